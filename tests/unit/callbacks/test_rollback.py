"""What a rollback asks of the controls, what it remembers, and what it writes."""

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppo_lightning.callbacks import CheckpointRollback, RollbackReport
from ppo_lightning.callbacks.rollback_report import extremes
from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.diagnostics import ILLNESSES
from ppo_lightning.metrics import AnswerStats, IterationStats
from ppo_lightning.modules import Controls, Request
from ppo_lightning.modules.controls import ppo_dials
from ppo_lightning.types import Verdict

DIALS = ("actor_lr_factor", "critic_lr_factor", "kl_coef", "clip_range")
ILL = Verdict(illness="kl_runaway", evidence="KL is 74 nats.", iteration=3, source="me")


def module(kl_coef=0.05):
    return SimpleNamespace(controls=Controls(ppo_dials(PPOConfig(), KLConfig(coef=kl_coef))))


def cut(callback, model, times=1):
    for _ in range(times):
        callback.num_rollbacks += 1
        callback.cuts.apply(model.controls, ILL, number=callback.num_rollbacks)
    return [model.controls[dial] for dial in DIALS]


def test_rates_and_beta_change_with_every_rollback_within_bounds():
    callback, model = CheckpointRollback(clip_range_factor=0.5), module()
    assert cut(callback, model) == pytest.approx([0.1, 0.5, 0.1, 0.1])
    assert cut(callback, model) == pytest.approx([0.01, 0.25, 0.2, 0.05])
    assert cut(callback, model, times=5) == pytest.approx([0.01, 0.1, 0.2, 0.05])


def test_what_is_not_asked_for_is_left_alone():
    callback, model = CheckpointRollback(actor_lr_factor=1.0, kl_coef_factor=1.0), module()
    assert cut(callback, model, times=3) == pytest.approx([1.0, 0.125, 0.05, 0.2])


def test_a_run_without_penalty_gets_one():
    callback, model = CheckpointRollback(), module(kl_coef=0.0)
    assert cut(callback, model)[2] == pytest.approx(0.05)
    assert cut(callback, model)[2] == pytest.approx(0.1)
    assert cut(callback, model)[2] == pytest.approx(0.1), "×4 is the bound, ×2 was in the first"
    steep = CheckpointRollback(kl_coef_factor=4.0, max_kl_coef_factor=2.0)
    assert cut(steep, module(kl_coef=0.0))[2] == pytest.approx(0.05), "it begins where it is told"
    assert cut(CheckpointRollback(kl_coef_from_zero=None), module(kl_coef=0.0))[2] == 0


def test_safety_has_the_last_word_over_a_controller():
    callback, model = CheckpointRollback(), module()
    cut(callback, model)
    model.controls.request(Request(source="law", dial="kl_coef", value=0.3))
    assert model.controls["kl_coef"] == pytest.approx(0.6)
    entry = model.controls.journal[0]
    assert entry["source"] == "CheckpointRollback"
    assert entry["reason"] == "rollback 1, kl_runaway: KL is 74 nats."


def test_changes_can_be_held_for_a_while():
    callback, model = CheckpointRollback(hold_iterations=2), module()
    cut(callback, model)
    for iteration, factor in ((4, 0.1), (5, 0.1), (6, 1.0)):
        model.controls.iteration = iteration
        assert model.controls["actor_lr_factor"] == pytest.approx(factor)


@pytest.mark.parametrize("kl_coef", [0.05, 0.0])
def test_changes_that_no_longer_hold_are_not_multiplied(kl_coef):
    callback, model = CheckpointRollback(hold_iterations=2), module(kl_coef=kl_coef)
    first = cut(callback, model)
    model.controls.iteration = 6  # they held until 5
    callback.cuts.apply(model.controls, replace(ILL, iteration=6), number=2)
    assert [model.controls[dial] for dial in DIALS] == pytest.approx(first)
    model.controls.iteration = 8
    callback.cuts.apply(model.controls, replace(ILL, iteration=8), number=3)
    assert model.controls["actor_lr_factor"] == pytest.approx(0.01), "in force to the last"


def test_a_name_that_nothing_reports_is_warned_of():
    callback = CheckpointRollback(illnesses=["kl_runaway", "kl_runnaway"])
    with pytest.warns(UserWarning, match=r"`kl_runnaway` is none.*mean `kl_runaway`\?.*Known: "):
        callback._warn_of_unknown_names()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointRollback(illnesses=[*ILLNESSES])._warn_of_unknown_names()
        CheckpointRollback()._warn_of_unknown_names()


def test_its_state_survives_a_checkpoint(tmp_path):
    callback = CheckpointRollback()
    cut(callback, module(kl_coef=0.0), times=2)
    stats = IterationStats(
        iteration=4, kl_ref=0.1, value_loss=float("inf"), val_greedy=AnswerStats(gold=1 / 3)
    )
    callback.history, states = [stats], callback.states
    states.on_trial, states.just_restored, states.proven = 4, 2, 3
    torch.save(callback.state_dict(), tmp_path / "state.pt")
    other = CheckpointRollback()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state_dict() == callback.state_dict()
    assert other.history == [stats]
    assert cut(other, module(kl_coef=0.0))[2] == pytest.approx(0.1), "it still knows of the zero"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every_n_iterations", 0),
        ("keep", 0),
        ("storage", "tape"),
        ("max_rollbacks", -1),
        ("actor_lr_factor", 2.0),
        ("critic_lr_factor", 0.0),
        ("kl_coef_factor", 0.5),
        ("max_kl_coef_factor", 0.5),
        ("kl_coef_from_zero", 0.0),
        ("clip_range_factor", 1.5),
        ("min_actor_lr_factor", 0.0),
        ("min_critic_lr_factor", 1.1),
        ("min_clip_range_factor", -1.0),
        ("hold_iterations", 0),
        ("num_texts", -1),
    ],
)
def test_nonsense_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"`{setting}`"):
        CheckpointRollback(**{setting: value})


def report(**changes):
    settings = {
        "number": 2,
        "verdicts": [ILL],
        "restored": 1,
        "stretch": [IterationStats(iteration=i, kl_ref=float("nan")) for i in (2, 3)],
        "changes": {"kl_coef": (0.05, 0.1)},
        "notes": ["snapshot `x` is passed over: cut short"],
        "texts": [{"iteration": 3, "response": "ünï", "score": float("nan")}],
    }
    return RollbackReport(**(settings | changes))


def test_a_report_says_why_and_what_was_done():
    text = report().text()
    for part in (
        "kl_runaway in iteration 3: back to the state after iteration 1; rollback 2.",
        "- `kl_runaway` (me): KL is 74 nats.",
        "- `kl_coef`: 0.05 → 0.1",
        "- snapshot `x` is passed over",
        "iterations 2, 3, which were undone",
    ):
        assert part in text
    assert "stopped" not in text
    assert "the start of the run; the run stops" in report(restored=-1, stopped=True).text()


def test_a_report_is_written_beside_what_was_undone(tmp_path):
    report().write(tmp_path / "2")
    assert (tmp_path / "2/report.md").read_text(encoding="utf-8") == report().text()
    rows = (tmp_path / "2/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["run/iteration"] for row in rows] == [2, 3]
    text = json.loads((tmp_path / "2/texts.jsonl").read_text(encoding="utf-8"))
    assert text == {"iteration": 3, "response": "ünï", "score": None}


def test_the_worst_and_best_texts_are_picked():
    raw = torch.tensor([1.0, float("nan"), 3.0, -2.0, 0.0])
    collected = SimpleNamespace(
        result=SimpleNamespace(raw=raw),
        completions=SimpleNamespace(prompts=list("abcde"), responses=list("ABCDE")),
    )
    picked = extremes(collected, 7, 2)
    assert [row["response"] for row in picked] == ["B", "D", "A", "C"]
    assert picked[1] == {"iteration": 7, "prompt": "d", "response": "D", "score": -2.0}
    assert [row["response"] for row in extremes(collected, 7, 3)] == ["B", "D", "E", "A", "C"]
    assert extremes(collected, 7, 0) == []
