"""What each step of a recipe is made of: finished steps on disk are recognised by it."""

import json

import pytest

from experiments.recipes import common
from experiments.recipes.chat import CHATS, Chat
from experiments.recipes.recipe import Recipe
from experiments.recipes.reviews import OPENINGS, Reviews

FILES = ("demonstrations", "pairs", "prompts")


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """The steps as they are asked for, none of them taken: ``{name: of}``."""
    asked = {}

    def take(_, name, make, *, of):
        asked.setdefault(name, common.plain(of))
        return {"result of": name}

    monkeypatch.setattr(common.Steps, "take", take)
    (tmp_path / "data").mkdir()
    for name in (*FILES, *(f"val_{file}" for file in FILES), "judge"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(name, encoding="utf-8")
    return asked


def result(name):
    return {"result of": name}


@pytest.mark.parametrize("kind", [Chat, Reviews])
@pytest.mark.parametrize("small", [True, False])
def test_each_step_names_what_it_was_made_of(kind: type[Recipe], small, steps, tmp_path):
    recipe = kind(tmp_path, small)
    recipe.take_all([0, 3])
    seeds = [name for n in (0, 3) for name in (f"ppo-{n}", f"export-{n}")]
    judged = ["judge"] if kind is Chat else []
    assert list(steps) == ["data", "sft", "reward", *judged, "check-reward", *seeds]
    assert set(steps["data"]) == {"sizes"}
    for step in ("sft", "reward"):
        assert set(steps[step]) == {"config", "data", "options"}
        assert steps[step]["options"] == list(recipe.options[step])
    assert steps["check-reward"] == {"reward": result("reward")}
    assert set(steps["ppo-3"]) == {"config", "data", "options", "sft", "reward", "judge"}
    assert [steps["ppo-3"][name] for name in ("sft", "reward")] == [result("sft"), result("reward")]


def test_a_judge_is_a_step_or_the_digest_of_its_texts(steps, tmp_path):
    Chat(tmp_path, True).take_all([0])
    assert steps["ppo-0"]["judge"] == result("judge")
    assert set(steps["judge"]) == {"code", "data"}
    assert steps["export-0"] == {"ppo": result("ppo-0"), "examples": json.loads(json.dumps(CHATS))}
    steps.clear()
    Reviews(tmp_path, True).take_all([0])
    assert steps["ppo-0"]["judge"] == common.digest(tmp_path / "data" / "judge.jsonl")
    assert steps["export-0"]["examples"] == list(OPENINGS)


@pytest.mark.parametrize("kind", [Chat, Reviews])
def test_ppo_is_told_where_the_steps_before_it_lie(kind, steps, tmp_path):
    options = kind(tmp_path, True)._ppo_options()
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given["--model.policy.path"] == str(tmp_path / "sft")
    assert given[f"--model.rewards[{kind.term}].component.path"] == str(tmp_path / "reward")
    judge = tmp_path / ("judge" if kind is Chat else "data/judge.jsonl")
    assert str(judge) in given.values()
