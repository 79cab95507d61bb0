"""Each rule speaks on its own sign and is silent on a healthy run."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_lightning.diagnostics import (
    COMPANIONS,
    HANDBOOK,
    ILLNESSES,
    RULES,
    Course,
    RuleLimits,
)
from ppo_lightning.diagnostics.rules.learning import (
    BLIND,
    CATCHING_UP,
    DIVERGING,
    HELD_BACK,
    TOO_SLOW,
)
from ppo_lightning.diagnostics.rules.numbers import SPREADING
from ppo_lightning.metrics import GroupStats, IterationStats, PositionStats
from tests.helpers.courses import finding, gold, healthy, run


@pytest.mark.parametrize("length", [1, 2, 5, 20, 90])
def test_all_are_silent_on_a_healthy_run(length):
    rows = run(length)
    found = {rule.illness: rule.examine(Course(rows), RuleLimits()) for rule in RULES}
    assert {name for name, seen in found.items() if seen and seen.severity != "watch"} == set()


def test_every_illness_has_a_rule_and_a_card():
    names = [rule.illness for rule in RULES]
    assert sorted(names) == sorted(ILLNESSES) == sorted(HANDBOOK)
    assert set(COMPANIONS) <= set(names)
    assert {name for others in COMPANIONS.values() for name in others} <= set(names)


SKIPPED, FAR = "steps_skipped_nonfinite", {"kl_old": 0.06, "clip_fraction": 0.35}

SICK = {
    "loss": ("nonfinite_update", {"policy_loss": math.nan}, "critical"),
    "kl": ("nonfinite_update", {"kl_ref": math.inf}, "critical"),
    "few skipped": ("nonfinite_update", {SKIPPED: 1.0, "steps_taken": 15.0}, "watch"),
    "some skipped": ("nonfinite_update", {SKIPPED: 2.0}, "ill"),
    "all skipped": ("nonfinite_update", {SKIPPED: 8.0, "steps_taken": 0.0}, "critical"),
    "network": ("nonfinite_update", {"nonfinite_responses": 3.0}, "ill"),
    "networks": ("nonfinite_update", {"nonfinite_responses": 90.0}, "critical"),
    "one score": ("reward_nonfinite", {"dropped_responses": 1.0}, "watch"),
    "scores": ("reward_nonfinite", {"dropped_responses": 9.0}, "ill"),
    "all scores": ("reward_nonfinite", {"dropped_responses": 128.0}, "critical"),
    "wide": ("reward_scale", {"score_std": 9.0}, "watch"),
    "very wide": ("reward_scale", {"score_std": 900.0}, "ill"),
    "lag": ("stale_rollouts", {"lag_mean": 1.0}, "watch"),
    "long lag": ("stale_rollouts", {"lag_mean": 3.0}, "ill"),
    "negative": ("stale_rollouts", {"kl_ref": -0.6}, "ill"),
    "cut weights": (
        "stale_rollouts",
        {"lag_mean": 1.0, "importance_mean": 1.0, "importance_capped_share": 0.2},
        "ill",
    ),
    "rounding": ("sampling_mismatch", {"sampler_mismatch": 0.008}, "watch"),
    "mismatch": ("sampling_mismatch", {"sampler_mismatch": 0.03}, "ill"),
    "ratio": ("sampling_mismatch", {"first_ratio_error": 0.7}, "ill"),
    "explosion": ("update_too_large", {"kl_old": 0.3, "clip_fraction": 0.25}, "critical"),
    "one ratio": ("update_too_large", {"kl_old": 0.7, "clip_fraction": 0.1}, "watch"),
    "far": ("update_too_large", FAR, "ill"),
    "clipped": ("update_too_large", {"clip_fraction": 0.25}, "watch"),
    "epochs": ("overfit_buffer", {**FAR, "epochs_done": 9.0}, "ill"),
    "waiting": ("rank_trouble", {"waiting_share": 0.5}, "watch"),
    "long waiting": ("rank_trouble", {"waiting_share": 0.9}, "ill"),
}  # fmt: skip


@pytest.mark.parametrize("name", SICK)
def test_a_sign_of_one_iteration(name):
    illness, changes, severity = SICK[name]
    rows = run(12, **({} if "waiting_share" not in changes else changes))
    rows = [*rows[:-3], *(healthy(i, **changes) for i in (9, 10, 11))]
    found = finding(illness, rows)
    assert found is not None
    assert found.severity == severity
    assert found.evidence
    assert finding(illness, run(12)) is None


def test_an_update_that_went_too_far_is_told_from_many_epochs():
    far = {"kl_old": 0.3, "clip_fraction": 0.5}
    assert finding("overfit_buffer", run(3, **far)) is None
    assert finding("update_too_large", run(3, epochs_done=8.0, **far)) is None
    fewer = run(30, epochs_done=lambda i: 8.0 if i < 10 else 4.0, **far)
    *_, epochs = finding("overfit_buffer", fewer[:20]).evidence
    assert (epochs.before, epochs.now) == (8.0, 4.0)
    assert finding("overfit_buffer", fewer) is None  # the many passes are long ago
    assert finding("update_too_large", fewer) is not None


def test_weights_that_correct_a_lag_are_no_illness():
    rows = run(4, lag_mean=1.0, importance_mean=1.0, importance_capped_share=0.01)
    assert finding("stale_rollouts", rows) is None


def test_a_run_that_goes_on_with_one_rank_waits_for_nobody():
    waiting = run(8, waiting_share=lambda i: 0.9 if i < 7 else None)
    assert finding("rank_trouble", waiting[:7]) is not None
    assert finding("rank_trouble", waiting) is None


@pytest.mark.parametrize(
    ("lag", "allowed", "severity"),
    [
        (1.0, 1.0, None),
        (0.5, 1.0, None),
        (1.5, 1.0, "watch"),
        (3.0, 1.0, "ill"),
        (1.0, 0.0, "watch"),
    ],
)
def test_the_lag_that_a_run_is_set_up_for_is_no_illness(lag, allowed, severity):
    seen = finding("stale_rollouts", run(4, lag_mean=lag, lag_allowed=allowed))
    assert (seen and seen.severity) == severity
    negative = finding("stale_rollouts", run(4, lag_mean=lag, lag_allowed=allowed, kl_ref=-0.6))
    assert "never negative" in str(negative.evidence[-1])  # whatever lag is allowed


def test_what_is_left_out_by_a_rule_is_no_broken_score():
    assert finding("reward_nonfinite", run(2, dropped_responses=9.0, stale_dropped=9.0)) is None
    assert (
        finding("reward_nonfinite", run(2, dropped_responses=9.0, nonfinite_responses=9.0)) is None
    )
    empty = {"dropped_responses": 60.0, "unscored_responses": 0.0}
    assert finding("reward_nonfinite", run(2, **empty)) is None
    broken = run(2, **empty | {"unscored_responses": 9.0})
    (evidence,) = finding("reward_nonfinite", broken).evidence
    assert (evidence.metric, evidence.now) == ("rollout/unscored_responses", 9.0)


@pytest.mark.parametrize(
    ("iteration", "kl", "length", "seen"),
    [(0, 0.2, 9.0, True), (0, -0.2, 9.0, True), (1, 0.2, 9.0, False), (0, 0.05, 9.0, False),
     (0, 0.2, 300.0, False), (0, 0.4, 300.0, True)],
)  # fmt: skip
def test_a_kl_before_any_update_is_looked_at(iteration, kl, length, seen):
    rows = run(iteration + 1, kl_ref=kl, response_length_mean=length)
    found = finding("sampling_mismatch", rows)
    assert (found is not None) == seen
    assert found is None or found.severity == "watch"
    assert finding("sampling_mismatch", rows, first_kl=1.0, first_kl_per_token=1.0) is None


@pytest.mark.parametrize("at", [0, 7])
def test_an_outlier_is_seen_with_and_without_a_past(at):
    rows = run(8, raw_score_q25=-1.0, raw_score_median=-0.5, raw_score_q75=0.0)[: at + 1]
    odd = {"raw_score_skew": 11.0, "raw_score_max": 1e6}
    rows[-1] = replace(rows[-1], **odd)
    found = finding("reward_outlier", rows)
    assert found is not None
    assert found.evidence[0].now == 1e6
    rows[-1] = replace(rows[-1], raw_score_max=9.0)  # a skew alone is none
    assert finding("reward_outlier", rows) is None


def test_few_scores_cannot_be_very_skewed():
    odd = {"raw_score_skew": 5.3, "raw_score_max": 1e6}
    rows = [*run(6), healthy(6, num_responses=32.0, **odd)]
    assert finding("reward_outlier", rows) is not None
    assert finding("reward_outlier", [*run(6), healthy(6, num_responses=128.0, **odd)]) is None
    for unknown in (None, -1.0, 0.0):
        rows = [*run(6), healthy(6, num_responses=unknown, **odd)]
        assert finding("reward_outlier", rows) is None


@pytest.mark.parametrize(("changes", "form"), [
    ({SKIPPED: 2.0}, ""), ({SKIPPED: 8.0, "steps_taken": 0.0}, SPREADING),
    ({"policy_loss": math.nan}, SPREADING), ({"nonfinite_responses": 3.0}, SPREADING),
])  # fmt: skip
def test_a_step_that_was_skipped_is_told_from_numbers_that_spread(changes, form):
    assert finding("nonfinite_update", run(3, **changes)).form == form


def in_parts(i, share):
    at = {"0": PositionStats(mean=2.0), "1": PositionStats(mean=2.0 * share)}
    of = {"code": GroupStats(entropy=1.0), "chat": GroupStats(entropy=1.5 * (1 + share) / 2)}
    return healthy(i, entropy_at=at, groups=of)


def test_a_place_or_group_that_lost_its_entropy_alone_is_watched():
    rows = [in_parts(0, 1.0), in_parts(1, 0.9), *(in_parts(i, 0.4) for i in (2, 3))]
    found = finding("entropy_collapse", rows)
    assert found.severity == "watch"
    assert [(e.metric, e.now, e.before) for e in found.evidence] == [
        ("rollout/entropy_at/1/mean", 0.8, 2.0)
    ]
    assert finding("entropy_collapse", rows[:-1]) is None  # once is noise
    assert finding("entropy_collapse", [*rows, healthy(4)]) is None  # a part that is not there
    lower = [in_parts(0, 1.0), *(in_parts(i, -0.1) for i in (1, 2, 3))]
    metrics = [e.metric for e in finding("entropy_collapse", lower).evidence]
    assert metrics == ["rollout/group/chat/entropy"]  # an entropy below 0 is none


def longer(i):
    return 9.0 + min(i, 5)


def test_length_is_exploited_where_it_went_with_the_score_from_the_start():
    rows = run(8, response_length_mean=longer, score_length_correlation=0.9)
    found = finding("length_exploitation", rows)
    assert found is not None
    assert found.severity == "ill"
    assert finding("length_exploitation", run(8, response_length_mean=longer)) is None
    assert finding("length_exploitation", run(8, score_length_correlation=0.9)) is None
    falling = run(8, response_length_mean=longer, score_length_correlation=0.9,
                  raw_score_mean=lambda i: -0.1 * i)  # fmt: skip
    assert finding("length_exploitation", falling) is None


def surge(i):
    return 0.8 * i


def test_a_surge_that_the_judge_does_not_share_is_hacking():
    rows = run(10, raw_score_mean=surge, val_sampled=lambda i: gold(1.0 - 0.3 * i))
    found = finding("reward_hacking", rows)
    assert found is not None
    assert found.severity == "critical"
    agreed = run(10, raw_score_mean=surge, val_sampled=lambda i: gold(0.3 * i), kl_ref=50.0,
                 repeated_bigrams=lambda i: 0.08 * i)  # fmt: skip
    assert finding("reward_hacking", agreed) is None


def test_without_a_judge_a_surge_is_known_by_its_price():
    paid = {"kl_ref": lambda i: 3.0 * i, "repeated_bigrams": lambda i: 0.1 + 0.05 * i}
    rows = run(10, raw_score_mean=surge, **paid)
    assert finding("reward_hacking", rows).severity == "watch"
    rows = run(10, raw_score_mean=surge, response_length_mean=lambda i: 9.0 + i, **paid)
    assert finding("reward_hacking", rows).severity == "ill"
    assert finding("reward_hacking", run(10, raw_score_mean=surge)) is None
    assert finding("reward_hacking", run(10, **paid)) is None  # and no surge, no hacking


@pytest.mark.parametrize(("error", "fall", "expected"), [
    (None, 0.5, True), (None, 0.3, False), (0.1, 0.7, True), (0.1, 0.5, False),
])  # fmt: skip
def test_a_judge_that_turns_away_is_over_optimisation(error, fall, expected):
    def judged(i):
        return gold(min(0.3 * i, 1.5) if i < 7 else 1.5 - fall, error)

    rows = run(9, raw_score_mean=lambda i: 0.3 * i, val_sampled=judged)
    assert (finding("over_optimisation", rows) is not None) == expected


@pytest.mark.parametrize("illness", ["reward_hacking", "over_optimisation"])
def test_half_of_the_entropy_for_a_small_gain_is_no_hacking(illness):
    def narrowed(i, **changes):
        judged = gold(1.0 - 0.3 * i)
        return healthy(i, val_sampled=judged, entropy=2.0 - 0.15 * i, **changes)

    rows = [narrowed(i, raw_score_mean=0.4 * i) for i in range(9)]
    assert finding(illness, rows).severity == "watch"
    assert finding(illness, rows, narrow_gain=1.0).severity != "watch"
    bought = [narrowed(i, raw_score_mean=0.8 * i) for i in range(9)]
    assert finding(illness, bought).severity != "watch"


def test_entropy_that_a_hacked_reward_takes_is_only_watched():
    rows = run(12, entropy=lambda i: 2.0 - 0.12 * i, val_sampled=lambda i: gold(1.0 - 0.1 * i))
    assert finding("entropy_collapse", rows).severity == "ill"
    rows = run(12, entropy=lambda i: 2.0 - 0.12 * i, val_sampled=lambda i: gold(1.0 - 0.3 * i))
    assert finding("entropy_collapse", rows).severity == "watch"
    assert finding("entropy_collapse", rows, hacked_gold=9.0).severity == "ill"


def test_good_answers_that_are_all_alike_make_no_outlier_of_a_usual_one():
    alike = run(20, raw_score_std=lambda i: 1.3 if i < 4 else 0.02, raw_score_mean=3.0)
    usual = {"raw_score_min": -2.0, "raw_score_skew": -9.0, "raw_score_mean": 3.0}
    assert finding("reward_outlier", [*alike, healthy(20, **usual)]) is None
    broken = usual | {"raw_score_min": -40.0}
    assert finding("reward_outlier", [*alike, healthy(20, **broken)]) is not None


def test_greedy_answers_are_judged_before_sampled_ones():
    rows = run(8, raw_score_mean=surge, val_sampled=lambda i: gold(2.0 - i), val_greedy=gold(1.0))
    assert finding("over_optimisation", rows) is None


def test_a_fall_of_the_score_is_a_collapse():
    rows = run(12)
    rows[-1] = replace(rows[-1], raw_score_mean=-3.0)
    assert finding("policy_collapse", rows).severity == "ill"
    rows[-1] = replace(rows[-1], entropy=0.1)
    assert finding("policy_collapse", rows).severity == "critical"
    rows[-1] = replace(rows[-1], raw_score_mean=-0.7)
    assert finding("policy_collapse", rows) is None


@pytest.mark.parametrize(("coef", "slope", "severity"), [
    (0.1, 0.5, "watch"), (0.0005, 0.5, "ill"), (0.1, 1.0, "ill"), (0.1, 1.5, "ill"),
    (0.1, 3.2, "critical"),
])  # fmt: skip
def test_kl_that_nothing_holds(coef, slope, severity):
    rows = run(13, kl_ref=lambda i: slope * i, kl_coef=coef)
    assert finding("kl_runaway", rows).severity == severity


def test_kl_on_a_plateau_is_watched():
    rows = run(30, kl_ref=lambda i: min(8.0, i), kl_coef=1e-4)
    assert finding("kl_runaway", rows).severity == "watch"


def test_bounds_on_kl_grow_with_the_answers():
    rows = run(13, kl_ref=lambda i: 2.0 * i, response_length_mean=400.0)
    assert finding("kl_runaway", rows) is None
    assert finding("kl_runaway", rows, kl_ref_per_token=0.001) is not None


def test_entropy_that_is_lost_slowly_or_at_once():
    assert finding("entropy_collapse", run(12, entropy=lambda i: 2.0 - 0.1 * i)).severity == "ill"
    assert (
        finding("entropy_collapse", run(20, entropy=lambda i: 2.0 - 0.1 * i)).severity == "critical"
    )
    rows = run(6)
    rows[-1] = replace(rows[-1], entropy=1.3)
    assert finding("entropy_collapse", rows).severity == "ill"
    assert finding("entropy_collapse", rows, entropy_fall=0.5) is None


def test_swings_are_an_oscillation():
    rows = run(12, raw_score_mean=lambda i: 1.5 * (i % 2))
    assert finding("oscillation", rows) is not None
    assert finding("oscillation", rows[:6]) is None
    assert finding("oscillation", run(12, raw_score_mean=lambda i: 1.5 * i)) is None


def test_the_noise_of_few_answers_is_no_oscillation():
    swing = {"raw_score_mean": lambda i: 1.5 * (i % 2)}
    assert finding("oscillation", run(12, num_responses=8.0, **swing)) is not None
    assert finding("oscillation", run(12, num_responses=4.0, **swing)) is None
    wide = {"raw_score_mean": lambda i: 4.5 * (i % 2)}
    assert finding("oscillation", run(12, num_responses=1.0, **wide)) is not None


def test_a_policy_that_moves_for_nothing_has_no_signal():
    rows = run(12, raw_score_mean=lambda i: 0.05 * (i % 2), kl_ref=lambda i: 0.2 * i)
    assert finding("no_reward_signal", rows).severity == "ill"
    assert finding("no_reward_signal", rows[:6]) is None  # too early to say
    assert finding("no_reward_signal", rows, moved_kl=9.0) is None
    held = run(12, raw_score_mean=-0.6, kl_ref=lambda i: 0.2 * i, kl_coef=9.0)
    assert finding("no_reward_signal", held) is None  # the penalty holds it back
    assert finding("stalled", held) is not None
    long = run(12, raw_score_mean=lambda i: 0.1 * i, kl_ref=lambda i: 8.0 * i,
               response_length_mean=1000.0)  # fmt: skip
    assert finding("no_reward_signal", long) is None  # little a token, and much is learnt
    same = run(3, raw_score_std=0.0)
    assert finding("no_reward_signal", same).severity == "ill"
    solved = run(9, raw_score_mean=lambda i: float(i), raw_score_std=lambda i: 1.0 * (i < 8))
    assert finding("no_reward_signal", solved).severity == "watch"


@pytest.mark.parametrize(("changes", "form", "severity"), [
    ({"kl_ref": 0.05, "kl_old": 0.004}, HELD_BACK, "ill"),
    ({"kl_ref": 0.7, "kl_coef": 40.0}, HELD_BACK, "ill"),
    ({"kl_ref": 0.7, "kl_coef": 2.5}, HELD_BACK, "ill"),
    ({"kl_ref": 1e-4, "kl_old": 1e-9, "clip_fraction": 0.0}, TOO_SLOW, "ill"),
    ({"kl_ref": 0.1, "kl_old": 1e-6}, TOO_SLOW, "watch"),
])  # fmt: skip
def test_a_stall_has_two_forms(changes, form, severity):
    found = finding("stalled", run(12, raw_score_mean=-0.6, **changes))
    assert (found.form, found.severity) == (form, severity)
    assert finding("stalled", run(6, raw_score_mean=-0.6, **changes)) is None


def test_a_pause_of_the_actor_is_no_stall():
    rows = run(12, raw_score_mean=-0.6, kl_ref=0.0, actor_steps=lambda i: 0.0 if i < 8 else 8.0)
    assert finding("stalled", rows) is None


@pytest.mark.parametrize(("variance", "length", "form", "severity"), [
    (-0.5, 4, DIVERGING, "ill"), (-9.0, 1, DIVERGING, "ill"), (0.0001, 9, BLIND, "ill"),
    (0.005, 9, BLIND, "watch"), (0.005, 16, BLIND, "ill"),
])  # fmt: skip
def test_a_critic_misleads_or_is_blind(variance, length, form, severity):
    found = finding("critic_failure", run(length, explained_variance=variance))
    assert (found.form, found.severity) == (form, severity)
    assert finding("critic_failure", run(3, explained_variance=0.0001)) is None


def test_a_bad_start_that_is_being_mended_is_told_from_a_critic_that_diverges():
    rows = run(5, explained_variance=-5.0, value_loss=lambda i: 90.0 / (i + 1))
    assert finding("critic_failure", rows).form == CATCHING_UP


SURGE = {"raw_score_mean": lambda i: -0.6 + 0.3 * i, "kl_ref": 9.0}
FALLING = {"val_greedy": lambda i: gold(1.0 - 0.2 * i, 0.02)}

DEGREES = {
    "step_up": ("reward_scale", {"score_std": 33.0}, 5.0, "ill", "watch"),
    "broken_share": ("reward_nonfinite", {"dropped_responses": 50.0}, 0.3, "ill", "critical"),
    "critical_gain": ("reward_hacking", SURGE | FALLING, 99.0, "critical", "ill"),
    "held_gain": ("over_optimisation", FALLING, 5.0, "ill", None),
    "opening_rise": (
        *("reward_hacking", SURGE | {"opening_share": lambda i: 0.02 + 0.025 * i}),
        *(0.9, "watch", None),
    ),
    "entropy_price": (
        *("reward_hacking", SURGE | {"entropy": lambda i: 2.0 - 0.04 * i}, 0.5, "watch", None),
    ),
    "entropy_critical": ("entropy_collapse", {"entropy": lambda i: 2.0 - 0.09 * i}, 0.2, "ill",
                         "critical"),
    "score_noise": (
        *("policy_collapse", {"raw_score_mean": lambda i: 0.5 * (i % 2) - 2.0 * (i == 19)}),
        *(20.0, "ill", None),
    ),
    "collapsed_entropy": (
        "policy_collapse",
        {"raw_score_mean": lambda i: -3.0 * (i == 19), "entropy": lambda i: 2.0 - 1.5 * (i == 19)},
        *(0.3, "ill", "critical"),
    ),
    "kl_growing": ("kl_runaway", {"kl_ref": lambda i: 0.6 * i, "kl_coef": 1.0}, 3.0, "ill",
                   "watch"),
    "kl_far": ("kl_runaway", {"kl_ref": 16.0, "kl_coef": 1.0}, 4.0, "ill", "watch"),
    "kl_critical": ("kl_runaway", {"kl_ref": 31.0}, 7.0, "critical", "ill"),
    "bought_gain": (
        *("no_reward_signal", {"raw_score_mean": lambda i: -0.6 + 0.025 * i, "kl_ref": 14.0}),
        *(0.2, "ill", None),
    ),
    "absurd_variance": ("critic_failure", {"explained_variance": lambda i: 0.3 - 4.3 * (i == 19)},
                        5.0, "ill", None),
    "swing_turns": ("oscillation", {"raw_score_mean": lambda i: 1.5 * (i % 2)}, 8, "ill", None),
}  # fmt: skip


@pytest.mark.parametrize("limit", DEGREES)
def test_degrees_are_limits_too(limit):
    illness, changes, value, before, after = DEGREES[limit]
    rows = run(20, **changes)
    severities = [finding(illness, rows), finding(illness, rows, **{limit: value})]
    assert [None if seen is None else seen.severity for seen in severities] == [before, after]


ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e3, 1e3)
NUMBERS = [f.name for f in fields(IterationStats) if str(f.type).startswith("float | None")]


@given(st.lists(st.dictionaries(st.sampled_from(NUMBERS), ANY), min_size=1, max_size=12))
def test_no_rule_trips_over_odd_numbers(rows):
    course = Course([IterationStats(iteration=i, **row) for i, row in enumerate(rows)])
    for rule in RULES:
        found = rule.examine(course, RuleLimits())
        assert found is None or found.evidence


@pytest.mark.parametrize("missing", NUMBERS)
def test_no_rule_needs_a_column(missing):
    rows = [replace(row, **{missing: None}) for row in run(20)]
    found = [rule.examine(Course(rows), RuleLimits()) for rule in RULES]
    assert all(seen is None or seen.severity == "watch" for seen in found)


@pytest.mark.parametrize("changes", [
    {"kl_ref": 0.0}, {"dropped_share": 1.5}, {"kl_growth": 0.9}, {"clip_watch": 0.5},
    {"patience": 0},
])  # fmt: skip
def test_limits_are_checked(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        RuleLimits(**changes)
