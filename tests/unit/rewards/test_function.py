import sys

import pytest
import torch

from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards import FunctionReward, scores_of
from tests.helpers.completions import make_completions

CPU = torch.device("cpu")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module, importable by name; returns its path."""

    def write(source, name="own_rewards"):
        file = tmp_path / f"{name}.py"
        file.write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        return file

    return write


LENGTHS = "def lengths(responses):\n    return [len(r) for r in responses]\n"


@pytest.mark.parametrize("form", ["{file}:lengths", "own_rewards:lengths", "own_rewards.lengths"])
def test_three_ways_to_name_a_function(module, form):
    file = module(LENGTHS)
    reward = FunctionReward(form.format(file=file))
    reward.setup(CPU)
    assert reward(make_completions(["", "ab", "好👍"])) == [0, 2, 2]


def test_a_file_relative_to_the_working_directory(module, tmp_path, monkeypatch):
    module(LENGTHS)
    monkeypatch.chdir(tmp_path)
    assert FunctionReward("own_rewards.py:lengths")(make_completions(["abc"])) == [3]


def test_a_method_of_a_class_and_a_file_with_dataclasses(module):
    # A dataclass looks its module up in sys.modules while it is being made.
    file = module(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Judge:\n    score: float\n"
        "    @staticmethod\n    def one(responses):\n        return [Judge(1.0).score]\n"
    )
    assert FunctionReward(f"{file}:Judge.one")(make_completions(["a"])) == [1.0]


def test_nothing_is_imported_before_setup(tmp_path):
    file = tmp_path / "explodes.py"
    file.write_text("raise RuntimeError('imported')\n")
    reward = FunctionReward(f"{file}:f")
    with pytest.raises(RuntimeError, match="imported"):
        reward.setup(CPU)


@pytest.mark.parametrize("target", ["", "lengths", "own.py", "own.py:", ":f", "a.b:c d"])
def test_addresses_that_are_none(target):
    with pytest.raises(ConfigError, match="must have the form"):
        FunctionReward(target)


def test_a_missing_function_and_the_nearest_name(module):
    file = module(LENGTHS + "def _hidden(): ...\nNUMBER = 3\n")
    with pytest.raises(ConfigError, match=r"has no `lenght`. Did you mean `lengths`\?") as caught:
        FunctionReward(f"{file}:lenght").setup(CPU)
    assert "_hidden" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"has no `nothing_like_it`\. It holds lengths"):
        FunctionReward(f"{file}:nothing_like_it").setup(CPU)
    with pytest.raises(ConfigError, match="is a int, not a function"):
        FunctionReward(f"{file}:NUMBER").setup(CPU)


def test_a_missing_file_and_the_nearest_one(module, tmp_path):
    module(LENGTHS)
    with pytest.raises(ConfigError, match=r"no such file.* Did you mean `own_rewards.py`\?"):
        FunctionReward(f"{tmp_path}/own_reward.py:lengths").setup(CPU)
    with pytest.raises(ConfigError, match="no such file"):
        FunctionReward(f"{tmp_path}/no/folder.py:lengths").setup(CPU)


@pytest.mark.parametrize("target", ["no_such_module_xyz:f", "no_such_module_xyz.sub:f"])
def test_a_missing_module(target):
    with pytest.raises(ConfigError, match="no module `no_such_module_xyz`"):
        FunctionReward(target).setup(CPU)


def test_a_module_that_lacks_something_itself_is_not_blamed_on_the_config(module):
    module("import no_such_module_xyz\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_xyz"):
        FunctionReward("own_rewards:f").setup(CPU)


def test_an_edited_file_is_read_again(module):
    reward = FunctionReward(f"{module(LENGTHS)}:lengths")
    assert reward(make_completions(["ab"])) == [2]
    edited = FunctionReward(f"{module(LENGTHS.replace('len(r)', '7'))}:lengths")
    assert edited(make_completions(["ab"])) == [7]
    assert reward(make_completions(["ab"])) == [2]


def test_a_file_that_failed_is_read_again(module, tmp_path):
    ready = tmp_path / "ready"
    file = module(f"open({str(ready)!r}).close()\n{LENGTHS}")
    with pytest.raises(FileNotFoundError):
        FunctionReward(f"{file}:lengths").setup(CPU)
    ready.touch()
    assert FunctionReward(f"{file}:lengths")(make_completions(["ab"])) == [2]


# What a function is called with


def called_with(module, signature, completions, arguments=None):
    """Define ``def f(signature)`` and return what it is called with."""
    file = module(
        f"seen = {{}}\ndef f({signature}):\n    seen.update(locals())\n    return [0.0]\n"
    )
    reward = FunctionReward(f"{file}:f", arguments)
    reward(completions)
    return reward._call.__globals__["seen"]


CHAT = ({"role": "user", "content": "q"},)
ONE = make_completions(
    ["a"],
    prompts=["q"],
    messages=[CHAT],
    metadata=[{"answer": 4, "level": "easy"}],
    truncated=[True],
    response_ids=[[5, 6]],
)


def test_only_what_the_function_asks_for(module):
    assert called_with(module, "responses, answer", ONE) == {"responses": ["a"], "answer": [4]}
    assert called_with(module, "*, level, prompts", ONE) == {"level": ["easy"], "prompts": ["q"]}


def test_everything_there_is(module):
    signature = "prompts, responses, messages, prompt_ids, response_ids, truncated, metadata"
    assert called_with(module, signature, ONE) == {
        "prompts": ["q"],
        "responses": ["a"],
        "messages": [CHAT],
        "prompt_ids": [[1, 2]],
        "response_ids": [[5, 6]],
        "truncated": [True],
        "metadata": [{"answer": 4, "level": "easy"}],
    }


def test_a_function_that_takes_anything_gets_everything(module):
    seen = called_with(module, "responses, bonus, **rest", ONE, {"bonus": 2})
    assert seen["responses"] == ["a"]
    assert seen["bonus"] == 2
    assert seen["rest"]["answer"] == [4]
    assert set(seen["rest"]) == {
        *("prompts", "messages", "prompt_ids", "response_ids", "truncated", "metadata"),
        *("answer", "level"),
    }


def test_anything_is_none_where_a_record_lacks_it(module):
    two = make_completions(["a", "b"], metadata=[{"answer": 1}, {}])
    file = module("def f(answer=None, **rest):\n    return [0.0, 0.0]\n", "rest_only")
    with pytest.raises(RewardError):  # asked for by name: some have it, one lacks it
        FunctionReward(f"{file}:f")(two)
    file = module("def f(**rest):\n    return rest['answer']\n", "all_rest")
    assert FunctionReward(f"{file}:f")(two) == [1, None]


def test_an_argument_wins_over_a_field(module):
    assert called_with(module, "answer", ONE, {"answer": 9}) == {"answer": 9}
    assert called_with(module, "**rest", ONE, {"answer": 9})["rest"]["answer"] == 9


def test_a_default_stands_in_for_a_field_that_no_record_has(module):
    assert called_with(module, "responses, weight=0.5", ONE)["weight"] == 0.5


def test_a_field_that_a_record_lacks(module):
    file = module("def f(responses, answr):\n    return [0.0]\n")
    with pytest.raises(RewardError, match=r"asks for `answr`.* Did it mean `answer`") as caught:
        scores_of(FunctionReward(f"{file}:f"), "maths", ONE)
    assert (caught.value.component, caught.value.sample) == ("maths", 0)


def test_arguments_that_the_function_does_not_know(module):
    file = module("def f(responses, scale=1.0):\n    return [0.0]\n")
    with pytest.raises(ConfigError, match=r"unknown key `scael` in `arguments`.*`scale`"):
        FunctionReward(f"{file}:f", {"scael": 2}).setup(CPU)
    with pytest.raises(ConfigError, match=r"must not name \['responses'\]"):
        FunctionReward(f"{file}:f", {"responses": 2})


def test_functions_that_cannot_be_called_by_name(module):
    file = module("def f(responses, /):\n    return [0.0]\n")
    with pytest.raises(ConfigError, match="by position only"):
        FunctionReward(f"{file}:f")(ONE)
    with pytest.raises(ConfigError, match="cannot tell the parameters"):
        FunctionReward("builtins:dict")(ONE)


# T01: numbers in an untyped dictionary


@pytest.mark.parametrize("text", ["1e-6", "5e-06", "1E6", "+.5e3", "-2.e-1"])
def test_scientific_notation_reaches_the_function_as_a_number(module, text):
    seen = called_with(module, "x, nested", ONE, {"x": text, "nested": {"a": [text]}})
    assert seen["x"] == float(text)
    assert type(seen["x"]) is float
    assert seen["nested"] == {"a": [float(text)]}


def test_text_stays_text(module):
    arguments = {"a": "12", "b": "e5", "c": "1e5 apples", "d": True, "e": None, "f": ["x"]}
    assert called_with(module, ", ".join(arguments), ONE, arguments) == arguments


def test_annotations_decide(module):
    seen = called_with(
        module,
        "name: str, code: str | None, steps: int, rate: float, limit: float | None, plain: 'int'",
        ONE,
        {"name": "1e5", "code": "1e5", "steps": "1e3", "rate": "2", "limit": None, "plain": 4.0},
    )
    assert seen == {
        **{"name": "1e5", "code": "1e5", "steps": 1000, "rate": 2.0, "limit": None, "plain": 4}
    }
    assert [type(seen[key]) for key in ("steps", "rate", "plain")] == [int, float, int]


@pytest.mark.parametrize(
    ("signature", "value", "message"),
    [
        ("x: float", "fast", "`arguments.x` must be a number, got 'fast'"),
        ("x: int", "2.5", "`arguments.x` must be a whole number, got '2.5'"),
        ("x: int | None", 2.5, "must be a whole number"),
        ("x: int", "inf", "must be a whole number"),
    ],
)
def test_annotated_numbers_refuse_what_is_none(module, signature, value, message):
    with pytest.raises(ConfigError, match=message):
        called_with(module, signature, ONE, {"x": value})


def test_annotations_that_only_a_type_checker_can_read(module):
    assert called_with(module, "x: 'NotImported'", ONE, {"x": "1e3"}) == {"x": 1000.0}
