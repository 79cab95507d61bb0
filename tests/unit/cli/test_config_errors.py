"""Every mistake in a config ends with one short message: place, key, what it may be."""

import warnings

import pytest

from ppo_lightning.cli.config_errors import read_message, reason
from tests.helpers.cli import changed, run_cli, tiny_config, write_config

ARGS = "model.init_args"
REWARD = f"{ARGS}.rewards.0.component"
BASE = tiny_config("some/model", "somewhere")


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    from ppo_lightning.cli.lightning import PPOLightningCLI

    monkeypatch.setattr(PPOLightningCLI, "_run_subcommand", lambda self, name: None)


def complaint(capsys, monkeypatch, tmp_path, config, *arguments):
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "-c", path, *arguments) == 2
    text = capsys.readouterr().err
    lines = [line for line in text.splitlines() if "Seed set" not in line and "used:" not in line]
    lines = [line for line in lines if "using:" not in line]
    assert 1 <= len(lines) <= 2, text
    assert lines[0].startswith("ppo-lightning: ")
    assert len(text) < 700
    return "\n".join(lines).replace(f"{path}:", "c.yaml:")


def line_of(config, key, tmp_path):
    from ppo_lightning.cli.config_files import read_entries

    path = write_config(tmp_path / "lines.yaml", config)
    return next(e.line for e in read_entries(path) if ".".join(e.keys) == key)


IN_A_FILE = [
    ("modle", 1, "unknown key `modle` in the config; did you mean `model`?"),
    ("ppo", {"clip_range": 0.1}, "did you mean `model.init_args.ppo`?"),
    ("trainer.max_epoch", 3, "unknown key `max_epoch` in `trainer`; did you mean `max_epochs`?"),
    (f"{ARGS}.sampler", {"a": 1}, f"unknown key `sampler` in `{ARGS}`; did you mean `sampling`?"),
    (f"{ARGS}.ppo.clip_rang", 0.2, f"in `{ARGS}.ppo`; did you mean `clip_range`?"),
    (f"{ARGS}.policy.lora", {"rnk": 4}, f"in `{ARGS}.policy.lora`; did you mean `rank`?"),
    (f"{ARGS}.rewards.0.wieght", 1, f"in `{ARGS}.rewards`; did you mean `weight`?"),
    (f"{REWARD}.init_args.target_token", 1, "did you mean `target_tokens`?"),
    ("data.init_args.promts", [], "did you mean `prompts`?"),
    ("data.init_args.buffer.num_prompt", 1, "did you mean `num_prompts`?"),
    (f"{ARGS}.ppo.clip_range", "abc", f"`{ARGS}.ppo.clip_range` must be a number, got `abc`."),
    (f"{ARGS}.ppo.target_kl", "abc", "must be a number or null, got `abc`."),
    (f"{ARGS}.ppo.whiten_advantages", "ja", "must be true or false, got `ja`."),
    (f"{ARGS}.kl.estimator", "k", "must be one of `k1`, `k2`, `k3`, `abs`, `full`, got `k`."),
    (f"{ARGS}.actor.schedule", "cosin", "got `cosin`. Did you mean `cosine`?"),
    (f"{ARGS}.rewards", {"name": 1}, f"`{ARGS}.rewards` must be a list, got"),
    ("data.init_args.prompts", 3, " or a list or a path, got `3`."),
    ("trainer.max_epochs", "many", "must be a whole number or null, got `many`."),
    (f"{ARGS}.ppo.microbatch_tokens", 1e6, "must be a whole number or null, got `1000000.0`. Wr"),
    (f"{ARGS}.ppo.microbatch_tokens", 1.5, "must be a whole number or null, got `1.5`.\n"),
    (
        f"{REWARD}.class_path",
        "ppo_lightning.rewards.TargetLenghtReward",
        "`ppo_lightning.rewards` has no `TargetLenghtReward`; did you mean "
        "`ppo_lightning.rewards.TargetLengthReward`?",
    ),
    (
        f"{REWARD}.class_path",
        "TargetLenghtReward",
        "did you mean `ppo_lightning.rewards.TargetLengthReward`?",
    ),
    (f"{REWARD}.class_path", "no_such.Reward", "there is no module `no_such`"),
    (
        f"{REWARD}.class_path",
        "ppo_lightning.rollout.NativeEngine",
        f"`ppo_lightning.rollout.NativeEngine` is not a Reward, as `{ARGS}.rewards.component`",
    ),
    ("model.class_path", "ppo_lightning.modules.PPOModul", "`ppo_lightning.modules.PPOModule`?"),
]


@pytest.mark.parametrize(("key", "value", "expected"), IN_A_FILE, ids=[k for k, _, _ in IN_A_FILE])
def test_mistakes_in_a_file(capsys, monkeypatch, tmp_path, key, value, expected):
    config = changed(BASE, key, value)
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert expected in text
    if isinstance(value, dict) and key.endswith("lora"):
        key = f"{key}.rnk"
    line = line_of(config, key.replace(".0.", "."), tmp_path)
    assert text.startswith(f"ppo-lightning: c.yaml:{line}: ")


def test_all_unknown_keys_of_a_section_are_told_at_once(capsys, monkeypatch, tmp_path):
    ppo = {"clip_rang": 0.2, "target_kl": 0.1, "gama": 0.9, "zzz": 1}
    config = changed(BASE, f"{ARGS}.ppo", ppo)
    first = line_of(config, f"{ARGS}.ppo.clip_rang", tmp_path)
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert text.startswith(f"ppo-lightning: c.yaml:{first}: unknown key `clip_rang` in")
    assert f"Unknown there, too: `gama` in line {first + 2} (`gamma`?), `zzz` in line" in text
    config = BASE | {"modle": 1, "dta": 2}
    line = line_of(config, "dta", tmp_path)
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert f"too: `dta` in line {line} (`data`?)." in text


def test_keys_of_other_entries_of_a_list_are_none_of_its_business(capsys, monkeypatch, tmp_path):
    length = BASE["model"]["init_args"]["rewards"][0]["component"]
    regex = {"class_path": "ppo_lightning.rewards.RegexReward", "init_args": {"pattern": "a"}}
    wrong = {"class_path": length["class_path"], "init_args": {"target_token": 3}}
    terms = [{"name": "a", "component": regex}, {"name": "b", "component": wrong}]
    text = complaint(capsys, monkeypatch, tmp_path, changed(BASE, f"{ARGS}.rewards", terms))
    assert "did you mean `target_tokens`?" in text
    assert "too" not in text


def test_keys_that_a_class_may_hand_on_are_not_called_unknown(capsys, monkeypatch, tmp_path):
    options = {"process_group_backnd": "gloo", "find_unused_parameters": True}
    strategy = {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": options}
    text = complaint(capsys, monkeypatch, tmp_path, changed(BASE, "trainer.strategy", strategy))
    assert "unknown key `process_group_backnd`" in text
    assert "too" not in text


CALLBACK = {"class_path": "ppo_lightning.callbacks.AdaptiveKL", "init_args": {"target": None}}

IN_THE_WRONG_FORM = [
    (f"{ARGS}.ppo.clip_range", None, "must not be null: leave it out for its default, `0.2`."),
    (f"{ARGS}.kl.coef", None, "must not be null: leave it out for its default, `0.05`."),
    (f"{ARGS}.sampling.temperature", None, "must not be null: leave it out"),
    (f"{ARGS}.sampling.stop_strings", None, "must not be null: leave it out for its default."),
    (f"{ARGS}.optimizer.options", None, "must not be null: leave it out for its default."),
    (f"{ARGS}.actor.lr", None, "must not be null: leave it out for its default, `1e-06`."),
    (f"{ARGS}.ppo", None, "must not be null: leave it out for its default."),
    (f"{ARGS}.sampling", None, "must not be null: leave it out for its default."),
    (f"{ARGS}.ppo", [1], "must hold keys and values, got `[1]`."),
    (f"{ARGS}.kl", [1], "must hold keys and values, got `[1]`."),
    (f"{ARGS}.ppo", 3, "must hold keys and values, got `3`."),
    (f"{ARGS}.policy.lora", [1], "must be keys with values or null, got `[1]`."),
    (f"{ARGS}.optimizer.options", [1], "must be keys with values, got `[1]`."),
    (f"{ARGS}.policy.lora", {"rank": None}, "must not be null: leave it out for its default, `16`"),
    ("data.init_args.buffer.num_prompts", None, "must not be null: leave it out"),
    ("data.init_args.buffer", None, "must not be null: leave it out for its default."),
    ("data.init_args.chat", None, "must not be null: leave it out for its default, `auto`."),
    ("trainer", None, "must hold keys and values, got `null`."),
    ("trainer.accumulate_grad_batches", None, "must not be null: leave it out"),
    ("model.init_args", None, "must be keys with values."),
    ("seed_everything", -1, "must lie in [0, 4294967295], got -1."),
    ("seed_everything", 10**12, "must lie in [0, 4294967295], got 1000000000000."),
]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    IN_THE_WRONG_FORM,
    ids=[f"{k}-{v}" for k, v, _ in IN_THE_WRONG_FORM],
)
def test_null_and_lists_where_they_are_no_value(
    capsys, monkeypatch, tmp_path, key, value, expected
):
    config = changed(BASE, key, value)
    if value == {"rank": None}:
        key = f"{key}.rank"
    text = complaint(capsys, monkeypatch, tmp_path, config)
    line = line_of(config, key, tmp_path)
    assert text.startswith(f"ppo-lightning: c.yaml:{line}: `{key}` {expected}")


def test_null_inside_lists_and_classes(capsys, monkeypatch, tmp_path):
    config = changed(BASE, f"{ARGS}.rewards.0.weight", None)
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert f"c.yaml:26: `{ARGS}.rewards[0].weight` must not be null: " in text
    config = changed(BASE, "trainer.callbacks", [CALLBACK])
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert "c.yaml:9: `trainer.callbacks[0].init_args.target` must not be null: " in text


def test_a_default_of_none_is_no_mistake_whatever_the_annotation(monkeypatch, tmp_path, capsys):
    from ppo_lightning.rewards import TargetLengthReward

    monkeypatch.setitem(TargetLengthReward.__init__.__annotations__, "scale", "float")
    path = write_config(tmp_path / "c.yaml", BASE)
    assert run_cli(monkeypatch, "fit", "-c", path) == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{REWARD}.init_args.target_tokens", -5, f"in `{ARGS}.rewards[0].component.init_args`: `"),
        (f"{ARGS}.rewards.0.name", "a b", f"in `{ARGS}.rewards[0]`: `name` of a reward"),
        (f"{ARGS}.rewards", [], f"in `{ARGS}`: `rewards` must name one component at least"),
        (
            f"{ARGS}.rewards",
            2 * BASE["model"]["init_args"]["rewards"],
            f"in `{ARGS}`: `rewards` must have names of their own, got ['length'] twice.",
        ),
    ],
)
def test_what_a_class_says_of_its_arguments_has_file_line_and_key(
    capsys, monkeypatch, tmp_path, key, value, expected
):
    text = complaint(capsys, monkeypatch, tmp_path, changed(BASE, key, value))
    assert text.startswith("ppo-lightning: c.yaml:")
    assert expected in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{ARGS}.policy", ..., f"`{ARGS}.policy.path` must be set."),
        (f"{ARGS}.rewards", ..., f"`{ARGS}.rewards` must be set."),
        (f"{ARGS}.rewards.0.name", ..., f"`{ARGS}.rewards.name` must be set."),
        ("data", ..., "`data.init_args.prompts` must be set."),
        ("model.ppo", {"clip_range": 1}, "unknown key `ppo` in `model`; put it below"),
        (
            f"{ARGS}.ppo.clip_range",
            3.0,
            f"in `{ARGS}.ppo`: `clip_range` must lie in [1e-06, 0.999999], got",
        ),
        (f"{ARGS}.critic.lr", -1.0, f"in `{ARGS}.critic`: `lr` must be"),
        (f"{ARGS}.policy.lora", {"rank": 0}, f"in `{ARGS}.policy.lora`: `rank` must be"),
        (f"{REWARD}.init_args.target_tokens", -5, "`target_tokens` must be"),
        ("trainer.accelerator", "gpu8", "invalid accelerator name"),
        ("data.init_args.buffer.num_prompts", 1, "in `data.init_args.buffer`: `num_minibatches`"),
    ],
)
def test_missing_and_impossible_settings(capsys, monkeypatch, tmp_path, key, value, expected):
    config = changed(BASE, key, value)
    assert expected in complaint(capsys, monkeypatch, tmp_path, config)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.init_args.ppo.clip_rang", "1"], "did you mean `clip_range`?"),
        (["--model.ppo.clip_rang=1"], "did you mean `clip_range`?"),
        (["--model.ppo.clip_range_hig=0.3"], "did you mean `clip_range_high`?"),
        (["--trainer.max_epoch", "3"], "did you mean `max_epochs`?"),
        (["--trainr.max_epochs", "3"], "did you mean `trainer`?"),
        (["--ppo.clip_range", "3"], "did you mean `model.init_args.ppo`?"),
        (["stray"], "unexpected argument `stray`."),
        (["--model.ppo.microbatch_tokens", "1e6"], "got `1e6`. Write 1000000."),
        (["--model.sampling.max_new_tokens", "many"], "must be a whole number, got `many`."),
        (["--trainer.logger", "CSVLoger"], "did you mean `lightning.pytorch.loggers.CSVLogger`?"),
        (["--trainer.max_epochs"], "--trainer.max_epochs: expected one argument"),
        (["--ckpt_path", "nowhere.ckpt"], "there is no checkpoint `nowhere.ckpt`."),
    ],
)
def test_mistakes_on_the_command_line(capsys, monkeypatch, tmp_path, arguments, expected):
    text = complaint(capsys, monkeypatch, tmp_path, BASE, *arguments)
    assert expected in text
    assert "c.yaml" not in text  # the file says something else, and is not to blame


@pytest.mark.parametrize("key", ["policy.lora", "ppo.target_kl", "init_args.policy.lora", "gold"])
def test_null_on_the_command_line_is_the_null_of_a_file(capsys, monkeypatch, tmp_path, key):
    config = changed(BASE, f"{ARGS}.policy.lora", {"rank": 2})
    path = write_config(tmp_path / "c.yaml", config)
    options = [f"--model.{key}", "null", "--print_config"]
    assert run_cli(monkeypatch, "fit", "--config", path, *options) == 0
    assert f" {key.rpartition('.')[2]}: null\n" in capsys.readouterr().out


def test_options_before_the_command(capsys, monkeypatch, tmp_path):
    path = write_config(tmp_path / "c.yaml", BASE)
    assert run_cli(monkeypatch, "-c", path, "fit") == 2
    assert "write the command first" in capsys.readouterr().err


def test_the_second_line_tells_where_the_settings_are_listed(capsys, monkeypatch, tmp_path):
    config = changed(BASE, f"{ARGS}.ppo.clip_rang", 0.2)
    text = complaint(capsys, monkeypatch, tmp_path, config)
    assert text.endswith(
        "`ppo-lightning fit --model.help ppo_lightning.PPOModule` lists the settings."
    )
    with warnings.catch_warnings():
        assert run_cli(monkeypatch, "fit", "--model.help", "ppo_lightning.PPOModule") == 0
    assert "--model.ppo.clip_range" in capsys.readouterr().out


UNION = """\
Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'a.B'>, <class 'NoneType'>]
  Errors:
    - Expected a <class 'NoneType'>
    - Problem with given class_path 'a.B':
        Parser key "x":
          Expected a <class 'float'>. Got value: y
  Given value type: <class 'dict'>
  Given value: {}"""


def test_the_branch_that_went_furthest_is_told():
    problem = read_message(UNION)
    assert problem.steps == ("model", "class:a.B", "x")
    assert problem.expected == ("a number",)
    assert problem.value == "y"


@pytest.mark.parametrize("text", ["", "something new", "Parser key"])
def test_unknown_messages_are_passed_on(text):
    assert reason(text) == text
