"""Options that change a part of a list."""

import math

import pytest
import yaml

from ppo_lightning.cli.list_overrides import override_lists
from ppo_lightning.errors import ConfigError

TEXT = """\
trainer:
  callbacks:
    - lightning.pytorch.callbacks.LearningRateMonitor
    - {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: x, patience: 2}}
model:
  init_args:
    rewards:
      - {name: rm, weight: 1e-3, component: {class_path: a.Learned, init_args: {path: old}}}
      - {name: praise, component: a.Praise}
    policy: {path: p}
data:
  init_args:
    prompts:
      - {path: one.jsonl, weight: 1, tags: [a, {name: b}]}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def changed(*arguments):
    """The list that jsonargparse is given, and the option it is given as."""
    *_, last = override_lists(["fit", *map(str, arguments)])
    option, _, value = last.partition("=")
    return option, yaml.safe_load(value)


def refusal(*arguments):
    with pytest.raises(ConfigError) as refused:
        override_lists(["fit", *map(str, arguments)])
    return str(refused.value)


@pytest.mark.parametrize("entry", ["[0]", "[rm]"])
@pytest.mark.parametrize("head", ["model", "model.init_args"])
@pytest.mark.parametrize("below", ["component.init_args.path", "component.path"])
@pytest.mark.parametrize("equals", [True, False])
def test_every_way_to_write_it(config, entry, head, below, equals):
    key = f"--{head}.rewards{entry}.{below}"
    given = [f"{key}=runs/rm"] if equals else [key, "runs/rm"]
    option, rewards = changed("--config", config, *given)
    assert option == "--model.rewards"
    assert rewards[0]["component"] == {"class_path": "a.Learned", "init_args": {"path": "runs/rm"}}
    assert rewards[1] == {"name": "praise", "component": "a.Praise"}


def test_other_arguments_stay_as_they_are(config):
    given = ["--a", "-1", "--print_config", "-c", str(config), "--model.rewards[0].weight", "-2"]
    result = override_lists(["fit", *given, "--b=3", "--c"])
    assert result[:6] == ["fit", *given[:5]]
    assert result[7:] == ["--b=3", "--c"]
    untouched = ["fit", "--config", str(config), "--x", "[0]", "--y={a: [1]}"]
    assert override_lists(untouched) == untouched


def test_lists_of_all_sections(config):
    option, callbacks = changed("-c", config, "--trainer.callbacks[1].patience", 5)
    assert option == "--trainer.callbacks"
    assert callbacks[1]["init_args"] == {"monitor": "x", "patience": 5}
    _, callbacks = changed("-c", config, "--trainer.callbacks[0].logging_interval", "step")
    assert callbacks[0]["init_args"] == {"logging_interval": "step"}
    assert callbacks[0]["class_path"].endswith("LearningRateMonitor")
    _, prompts = changed("-c", config, "--data.prompts[0].tags[b].name", "c")
    assert prompts == [{"path": "one.jsonl", "weight": 1, "tags": ["a", {"name": "c"}]}]
    _, prompts = changed("-c", config, "--data.prompts[0]", "{path: two.jsonl}")
    assert prompts == [{"path": "two.jsonl"}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3", 3),
        ("true", True),
        ("null", None),
        ("'1e-5'", "1e-5"),
        ("2020-01-01", "2020-01-01"),
        (".inf", math.inf),
        ("a b: c: d", "a b: c: d"),
        ("é'\"", "é'\""),
        ("{a: [1, no]}", {"a": [1, False]}),
        ("", ""),
    ],
)
def test_t01_values_are_what_a_config_file_would_have(config, text, value):
    from jsonargparse import get_loader

    *_, last = override_lists(["fit", "-c", str(config), f"--model.rewards[rm].weight={text}"])
    assert "\n" not in last
    rewards = get_loader("yaml")(last.partition("=")[2])
    assert rewards[0]["weight"] == value
    assert type(rewards[0]["weight"]) is type(value)


def test_t01_numbers_around_it_are_read_as_numbers(config):
    _, rewards = changed("-c", config, "--model.rewards[rm].name", "other")
    assert rewards[0]["weight"] == 0.001


def test_the_last_file_that_sets_the_list_wins_and_plus_adds_to_it(config, tmp_path):
    later, more = tmp_path / "later.yaml", tmp_path / "more.yaml"
    later.write_text("model: {init_args: {rewards: [{name: b, weight: 1}]}}", encoding="utf-8")
    more.write_text("model: {init_args: {rewards+: [{name: c}]}}", encoding="utf-8")
    option = ("--model.rewards[b].weight", 2)
    assert changed("-c", config, "-c", later, *option)[1] == [{"name": "b", "weight": 2}]
    assert changed("-c", later, "-c", more, *option)[1] == [
        {"name": "b", "weight": 2},
        {"name": "c"},
    ]
    assert "no entry `[b]`" in refusal("-c", later, "-c", config, *option)
    assert "no entry `[c]`" in refusal("-c", later, "--model.rewards[c].weight", 2, "-c", more)
    inline = "{model: {init_args: {rewards: [{name: b}]}}}"
    assert changed(f"--config={inline}", *option)[1] == [{"name": "b", "weight": 2}]


def test_it_is_worked_into_what_stands_before_it(config):
    whole = ("--model.rewards", "[{name: x}]")
    first, second = ("--model.rewards[0].weight", "2"), ("--model.init_args.rewards[0].a", "3")
    _, rewards = changed("-c", config, *whole, *first, *second)
    assert rewards == [{"name": "x", "weight": 2, "a": 3}]
    result = override_lists(["fit", "-c", str(config), *first, *whole])
    assert result[-2:] == list(whole), "a whole list that comes later wins"
    result = override_lists(["fit", "-c", str(config), *first, "--x=1", *second])
    assert [argument.partition("=")[0] for argument in result[3:]] == ["--x", "--model.rewards"]
    _, callbacks = changed("-c", config, "--trainer.callbacks+=X", "--trainer.callbacks[2].a", "1")
    assert callbacks[2] == {"class_path": "X", "init_args": {"a": 1}}


def test_shared_parts_of_a_file_are_changed_where_it_was_asked(tmp_path):
    path = tmp_path / "c.yaml"
    text = "model: {rewards: [&a {name: a, component: {path: x}}, {<<: *a, name: b}]}"
    path.write_text(text, encoding="utf-8")
    _, rewards = changed("-c", path, "--model.rewards[b].component.path", "y")
    assert [entry["component"]["path"] for entry in rewards] == ["x", "y"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("model.rewards[2].weight", 1), "`[2]`. There are: [0] or [rm], [1] or [praise]."),
        (("model.rewards[raise].weight", 1), "did you mean `[praise]`?"),
        (("model.rewads[0].weight", 1), "list `model.rewads`; did you mean `model.rewards`?"),
        (("model.policy[0].path", 1), "`model.policy` is no list."),
        (("data.prompts[0].weight[0]", 1), "`data.prompts[0].weight` is no list."),
        (("data.prompts[0].weight.x", 1), "`data.prompts[0].weight` is `1`, which has no `x`."),
        (("model.rewards[0]weight", 1), "cannot be read"),
        (("model.rewards[0", 1), "cannot be read"),
        (("model.rewards[0].weight",), "has no value"),
        (("model.rewards[0].weight", "--x"), "has no value"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_what_there_is(config, given, message):
    option, *value = given
    told = refusal("--config", config, f"--{option}", *value)
    assert told.startswith(f"`--{option}`")
    assert message in told


def test_the_last_entry_without_its_position_is_refused(config):
    given = ("--trainer.callbacks+=X", "--trainer.callbacks.patience=3")
    told = refusal("-c", config, *given, "--trainer.callbacks[0].a", 1)
    assert "the last entry of `trainer.callbacks`" in told
