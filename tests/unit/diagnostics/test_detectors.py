"""Detectors alone on hand-made rows, and all together on labelled traces."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppo_lightning.diagnostics import (
    ILLNESSES,
    UPDATE_ILLNESSES,
    DetectorConfig,
    against_keeping,
    all_measured_finite,
    detect,
    is_of_update_alone,
    trimmed,
)
from ppo_lightning.diagnostics.detectors import DETECTORS
from ppo_lightning.metrics import AnswerStats, IterationStats
from ppo_lightning.types import Verdict

TRACES = json.loads((Path(__file__).parent / "traces.json").read_text(encoding="utf-8"))["traces"]
OFF = {
    "nonfinite_share": None,
    "dropped_share": None,
    "max_kl_old": None,
    "max_kl_ref": None,
    "score_drop": None,
    "entropy_floor": None,
    "entropy_fall": None,
    "gold_drop": None,
}


def row(iteration=0, **measured):
    usual = {
        "score_mean": 1.0,
        "score_std": 1.0,
        "num_responses": 128.0,
        "kl_ref": 1.0,
        "entropy": 2.0,
        "kl_old": 0.01,
        "steps_taken": 4.0,
        "steps_skipped_nonfinite": 0.0,
    }
    return IterationStats(iteration=iteration, **(usual | measured))


def rows(*changes):
    return [row(i, **change) for i, change in enumerate(changes)]


def ills(history, **config):
    return {verdict.illness for verdict in detect(history, DetectorConfig(**config))}


def only(name, history, **config):
    """What one detector finds when all others are off."""
    kept = {key: getattr(DetectorConfig(), key) for key in name.split()}
    return ills(history, **(OFF | kept | config))


def golds(*values, **fields):
    return [row(i, val_greedy=AnswerStats(gold=value), **fields) for i, value in enumerate(values)]


# Labelled traces


def history_of(trace):
    columns = zip(*(trace[name] for name in ("nonfinite", "steps", "gold")), strict=True)
    names = ("score_mean", "score_std", "kl_ref", "entropy", "kl_old", "response_length_mean")
    return [
        row(
            i,
            num_responses=float(trace["num_responses"]),
            steps_taken=0.0 if bad else float(steps),
            steps_skipped_nonfinite=float(steps) if bad else 0.0,
            val_sampled=None
            if gold is None
            else SimpleNamespace(gold=gold, gold_error=trace["score_std"][i] / 128**0.5),
            **{name: trace[name][i] for name in names},
        )
        for i, (bad, steps, gold) in enumerate(columns)
    ]


def first_verdicts(name, **config):
    history, settings = history_of(TRACES[name]), DetectorConfig(**config)
    for end in range(1, len(history) + 1):
        if found := detect(history[:end], settings):
            return found
    return ()


@pytest.mark.parametrize("name", [n for n in TRACES if n.startswith("healthy")])
def test_healthy_traces_raise_no_alarm(name):
    assert first_verdicts(name) == ()
    # Nor is any of their states too near an illness to be kept.
    history, near = history_of(TRACES[name]), DetectorConfig().tightened()
    assert not any(detect(history[:end], near) for end in range(1, len(history) + 1))


@pytest.mark.parametrize(
    ("name", "illness", "latest"),
    [
        ("actor_lr_too_high.a", "update_too_large", 0),
        ("nan_gradient.a", "nonfinite_update", 10),
        ("reward_hacking.a", "over_optimisation", 5),
        ("kl_runaway.a", "entropy_collapse", 13),
    ],
)
def test_sick_traces_are_found(name, illness, latest):
    found = first_verdicts(name)
    assert illness in {verdict.illness for verdict in found}
    assert max(verdict.iteration for verdict in found) <= latest


def test_the_rollout_alone_shows_a_hacked_and_a_broken_run():
    """Without validation and without KL(old‖new), as late as the level needs."""
    hacked = first_verdicts("reward_hacking.a", gold_drop=None)
    assert {v.illness for v in hacked} == {"kl_runaway"}
    assert hacked[0].iteration == 6
    broken = first_verdicts("actor_lr_too_high.a", gold_drop=None, max_kl_old=None)
    assert {v.illness for v in broken} == {"policy_collapse"}
    assert broken[0].iteration == 1


def test_an_outlier_among_scores_is_no_collapse_afterwards():
    assert first_verdicts("reward_outlier.a") == ()


# One by one


def test_skipped_steps_are_judged_by_their_share_of_the_iteration():
    odd = {"steps_skipped_nonfinite": 1.0, "steps_taken": 63.0}
    assert not only("nonfinite_share", rows(*[odd] * 6)), "one of 64 is what skipping is for"
    third = {"steps_skipped_nonfinite": 2.0, "steps_taken": 4.0}
    assert not only("nonfinite_share", rows(third))
    assert only("nonfinite_share", rows(third), nonfinite_share=0.33) == {"nonfinite_update"}
    half = {"steps_skipped_nonfinite": 3.0, "steps_taken": 3.0}
    assert only("nonfinite_share", rows(half)) == {"nonfinite_update"}
    lost = {"steps_skipped_nonfinite": 1.0, "steps_taken": 0.0, "steps_skipped_kl": 7.0}
    assert only("nonfinite_share", rows(lost)), "what a KL stop left out is another matter"
    assert not only("nonfinite_share", rows({"steps_taken": 0.0}))
    assert only("nonfinite_share", rows({"kl_ref": math.nan})) == {"nonfinite_update"}
    assert not only("nonfinite_share", rows({"kl_ref": None, "steps_skipped_nonfinite": None}))


def test_rewards_are_broken_where_half_of_the_responses_are_dropped():
    few, many = {"dropped_responses": 63.0}, {"dropped_responses": 64.0}
    assert not only("dropped_share", rows(few))
    assert only("dropped_share", rows(few), dropped_share=0.4) == {"reward_nonfinite"}
    assert only("dropped_share", rows(many)) == {"reward_nonfinite"}
    of_networks = many | {"nonfinite_responses": 40.0}
    assert only("dropped_share", rows(of_networks)) == {"nonfinite_update"}
    (verdict,) = detect(rows(of_networks), DetectorConfig())
    assert "64 of 128 responses were dropped, 40 of these" in verdict.evidence
    assert not only("dropped_share", rows({"dropped_responses": 0.0, "num_responses": 0.0}))


def test_an_illness_of_the_update_alone_says_nothing_against_the_policy_it_began_with():
    def said(*names):
        return [Verdict(illness=n, evidence="", iteration=0, source="me") for n in names]

    assert is_of_update_alone(said(*UPDATE_ILLNESSES), row())
    assert not is_of_update_alone(said("nonfinite_update", "kl_runaway"), row())
    for suspicious in (
        {"kl_ref": math.nan},
        {"entropy": math.inf},
        {"nonfinite_responses": 1.0},
        {"steps_taken": 0.0},
    ):
        assert not is_of_update_alone(said("nonfinite_update"), row(**suspicious))


def test_an_update_that_went_too_far():
    assert only("max_kl_old", rows({"kl_old": 0.201})) == {"update_too_large"}
    for fine in (0.2, None, math.nan):
        assert not only("max_kl_old", rows({"kl_old": fine}))


def test_kl_must_be_large_and_have_jumped():
    level = [{"kl_ref": value} for value in (8.0, 8.5, 9.0, 9.5)]
    assert not only("max_kl_ref", rows(*level, {"kl_ref": 10.5})), "beyond, without a jump"
    assert not only("max_kl_ref", rows({"kl_ref": 0.1}, {"kl_ref": 9.9})), "a jump, not beyond"
    assert only("max_kl_ref", rows({"kl_ref": 0.1}, {"kl_ref": 10.1})) == {"kl_runaway"}
    assert only("max_kl_ref", rows(*level, {"kl_ref": 14.0})) == {"kl_runaway"}


def test_a_slow_climb_of_the_kl_ends_at_the_ceiling():
    climb = [{"kl_ref": 1.0 * i} for i in range(31)]
    assert not only("max_kl_ref", rows(*climb))
    assert only("max_kl_ref", rows(*climb, {"kl_ref": 30.5})) == {"kl_runaway"}
    assert not only("max_kl_ref", rows(*climb, {"kl_ref": 31.0}), kl_ceiling=None)


def test_the_bound_on_the_kl_grows_with_the_responses():
    jump = ({"kl_ref": 1.0}, {"kl_ref": 20.0, "response_length_mean": 300.0})
    assert not only("max_kl_ref", rows(*jump))
    assert only("max_kl_ref", rows(*jump), max_kl_ref_per_token=0.05)


def test_a_collapse_of_the_score_is_measured_in_its_noise():
    steady = [{"score_mean": 1.0}] * 6
    # Error of a difference of two means of 128 scores: 1/8; four of them are 0.5.
    assert not only("score_drop", rows(*steady, {"score_mean": 0.51}))
    assert only("score_drop", rows(*steady, {"score_mean": 0.49})) == {"policy_collapse"}
    few = {"num_responses": 8.0}  # the error is 1/2
    assert not only("score_drop", rows(*steady, {"score_mean": -0.9, **few}))
    assert only("score_drop", rows(*steady, {"score_mean": -1.1, **few}))
    many = {"num_responses": 1e6}  # a difference of half a deviation is needed nevertheless
    assert not only("score_drop", rows(*steady, {"score_mean": 0.6, **many}))
    assert not only("score_drop", rows({"score_mean": -9.0})), "there is no level yet"
    wobble = [{"score_mean": value} for value in (0.5, 1.5, 0.4, 1.6, 1.0)]
    assert not only("score_drop", rows(*wobble, {"score_mean": -1.0})), "the level itself varies"


def test_a_collapse_shows_in_the_raw_score_whatever_normalisation_makes_of_it():
    hidden = {"score_mean": 0.0, "score_std": 1.0, "raw_score_std": 2.0}
    steady = [hidden | {"raw_score_mean": 3.0}] * 6
    # Error of a difference of two means of 128 raw scores: 2/8; four of them are 1.
    assert not only("score_drop", rows(*steady, hidden | {"raw_score_mean": 2.1}))
    fallen = hidden | {"raw_score_mean": 1.9}
    assert only("score_drop", rows(*steady, fallen)) == {"policy_collapse"}
    assert not only("score_drop", rows({}, {}, fallen | {"score_mean": 1.0})), (
        "there is no raw level yet"
    )
    old = rows({}, {}, fallen | {"score_mean": -3.0})
    assert only("score_drop", old), "rows of an earlier version are judged by what they have"


def test_one_odd_iteration_does_not_move_the_level():
    outlier = [{"score_mean": value} for value in (1.0, 1.0, 500.0, 1.0, 1.0)]
    assert not only("score_drop", rows(*outlier, {"score_mean": 0.9}))
    assert only("score_drop", rows(*outlier, {"score_mean": -1.0}))


def test_entropy_against_the_first_iteration_and_against_its_level():
    slow = [{"entropy": 2.0 - 0.1 * i} for i in range(11)]
    assert not only("entropy_floor entropy_fall", rows(*slow)), "exactly half is left"
    assert only("entropy_floor", rows(*slow, {"entropy": 0.99})) == {"entropy_collapse"}
    assert not only("entropy_fall", rows(*slow, {"entropy": 0.99}))
    assert only("entropy_fall", rows({}, {}, {"entropy": 1.39})) == {"entropy_collapse"}
    assert not only("entropy_fall", rows({}, {}, {"entropy": 1.41}))
    assert not only("entropy_floor entropy_fall", rows({"entropy": 0.1})), "a sharp start"
    assert not only("entropy_floor", rows({"entropy": None}, {"entropy": 2.0}))


def test_gold_must_stay_below_its_best_for_two_validations():
    assert only("gold_drop", golds(1.0, 0.4, 0.4), min_gold_drop=0.5) == {"over_optimisation"}
    assert not only("gold_drop", golds(1.0, 0.4, 0.6), min_gold_drop=0.5)
    assert not only("gold_drop", golds(1.0, 0.6, 0.4), min_gold_drop=0.5)
    assert not only("gold_drop", golds(1.0, 0.4), min_gold_drop=0.5)
    unvalidated = [*golds(1.0, 0.4, 0.4), row(3)]
    assert not only("gold_drop", unvalidated, min_gold_drop=0.5), "judged where it was measured"
    assert not only("gold_drop", golds(1.0, -9.0, -9.0)), "without noise or margin it is silent"


def test_between_validations_the_last_one_speaks_against_keeping_a_state():
    config = DetectorConfig(min_gold_drop=0.5)
    fallen = [*golds(1.0, 0.4), row(2), row(3)]
    assert not detect(fallen, config)
    assert [v.illness for v in against_keeping(fallen, config)] == ["over_optimisation"]
    assert not against_keeping([*golds(1.0, 0.6), row(2)], config)
    assert not against_keeping([*golds(1.0, 0.4, 1.1), row(3)], config)
    assert not against_keeping(rows({}, {}), config)
    # Nothing else is judged twice, or later than in its own iteration.
    sick = [*golds(1.0), row(1, val_greedy=AnswerStats(gold=1.0), kl_old=9.0), row(2)]
    assert not against_keeping(sick, config)


def test_gold_margin_follows_the_error_of_the_means():
    def validated(*values):
        found = [SimpleNamespace(gold=value, gold_error=0.3) for value in values]
        return [row(i, val_greedy=None, val_sampled=answers) for i, answers in enumerate(found)]

    margin = 3 * 0.3 * math.sqrt(2)
    assert not only("gold_drop", validated(1.0, 1.01 - margin, 1.01 - margin))
    assert only("gold_drop", validated(1.0, 0.99 - margin, 0.99 - margin))


def test_everything_can_be_switched_off():
    sick = {"kl_ref": 1e6, "kl_old": 9.0, "score_mean": -1e6, "entropy": 1e-9}
    sick |= {"steps_taken": 0.0, "steps_skipped_nonfinite": 4.0, "dropped_responses": 128.0}
    history = [*golds(1.0, -9.0), row(2, val_greedy=AnswerStats(gold=-9.0), **sick)]
    found = detect(history, DetectorConfig(min_gold_drop=1.0))
    assert len(found) == len(DETECTORS)
    assert {verdict.illness for verdict in found} <= {*ILLNESSES}
    assert not detect(history, DetectorConfig(**OFF))


def test_verdicts_name_their_source_and_iteration():
    (verdict,) = detect([row(7, kl_old=1.0)], DetectorConfig(), source="me")
    assert (verdict.source, verdict.iteration) == ("me", 7)
    assert "1 nats per token" in verdict.evidence


def test_nothing_measured_is_no_illness():
    assert not detect([IterationStats(iteration=0)] * 3, DetectorConfig())


def test_a_state_on_the_brink_is_not_worth_keeping():
    near = DetectorConfig().tightened()
    for history in (
        rows({"kl_old": 0.19}),
        rows({"kl_ref": 0.0}, {"kl_ref": 9.5}),
        rows({}, *[{"entropy": 2.0 - 0.1 * i} for i in range(9)], {"entropy": 1.09}),
    ):
        assert not detect(history, DetectorConfig())
        assert detect(history, near)
    assert not detect(rows({"kl_ref": 0.0}, {"kl_ref": 8.9, "kl_old": 0.17}), near)
    judged = DetectorConfig(min_gold_drop=0.5)
    assert not detect(golds(1.0, 0.4), judged)
    assert detect(golds(1.0, 0.4), judged.tightened())
    assert not all_measured_finite(row(value_loss=math.inf))
    assert all_measured_finite(row(value_loss=None))


def test_trimming_keeps_what_detectors_look_at():
    history = [row(i, entropy=2.0, val_greedy=AnswerStats(gold=float(i == 3))) for i in range(20)]
    kept = trimmed(history, 5)
    assert [stats.iteration for stats in kept] == [0, 3, 15, 16, 17, 18, 19]
    assert trimmed(kept, 50) == kept
    assert trimmed(history[:2], 5) == history[:2]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("nonfinite_share", 0.0),
        ("nonfinite_share", 1.1),
        ("dropped_share", 0.0),
        ("dropped_share", 1.1),
        ("max_kl_old", 0.0),
        ("max_kl_ref", -1.0),
        ("kl_ceiling", 0.5),
        ("score_drop", math.nan),
        ("entropy_floor", 1.5),
        ("entropy_fall", -0.1),
        ("gold_drop", 0.0),
        ("min_gold_drop", -1.0),
        ("gold_patience", 0),
        ("window", 1),
        ("margin", 0.6),
    ],
)
def test_nonsense_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"`{setting}`"):
        replace(DetectorConfig(), **{setting: value})
