import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_lightning.functional import (
    UpdatePlan,
    WindowTrend,
    adapted_ent_coef,
    adapted_kl_coef,
    adapted_penalty_coef,
    further_cut,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    payoff_of_kl,
    pressure_on_update,
    relieved_plan,
    slope,
    window_trend,
)

SETTINGS = {"target": 6.0, "horizon": 10_000, "num_responses": 256}


def test_t26_controller_number():
    assert adapted_kl_coef(0.1, 9.0, **SETTINGS) == pytest.approx(0.100512, rel=1e-9)


def test_t26_kl_per_response_and_per_token_are_two_numbers():
    kl, mask = torch.full((2, 10), 0.1), mask_from_lengths(torch.tensor([10, 2]), 10)
    assert masked_sum(kl, mask, -1).mean().item() == pytest.approx(0.6)
    assert masked_mean(kl, mask).item() == pytest.approx(0.1)


@pytest.mark.parametrize("key", ["target", "horizon"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_t26_senseless_settings_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=f"`{key}` must be above 0"):
        adapted_kl_coef(0.1, 9.0, **SETTINGS | {key: value})


def test_t26_penalty_target_must_be_positive():
    with pytest.raises(ValueError, match="`target` must be above 0"):
        adapted_penalty_coef(0.1, 9.0, target=0.0)


def test_t26_horizon_that_could_turn_the_sign_is_refused():
    with pytest.raises(ValueError, match=r"`horizon` must exceed 0.2 times the 1000 responses"):
        adapted_kl_coef(0.1, 0.0, target=6.0, horizon=200, num_responses=1000)


def test_error_is_bounded_both_ways_and_zero_at_the_target():
    high, low = 0.1 * (1 + 0.2 * 0.0256), 0.1 * (1 - 0.2 * 0.0256)
    assert adapted_kl_coef(0.1, 600.0, **SETTINGS) == pytest.approx(high)
    assert adapted_kl_coef(0.1, -3.0, **SETTINGS) == pytest.approx(low)
    assert adapted_kl_coef(0.1, 6.0, **SETTINGS) == 0.1
    assert adapted_kl_coef(0.1, 6.6, **SETTINGS) == pytest.approx(0.1 * (1 + 0.1 * 0.0256))


def test_a_kl_that_is_nan_moves_nothing():
    assert adapted_kl_coef(0.1, float("nan"), **SETTINGS) == 0.1
    assert adapted_penalty_coef(0.1, float("nan"), target=1.0) == 0.1


def test_penalty_doubles_halves_and_stays():
    assert adapted_penalty_coef(1.0, 1.6, target=1.0) == 2.0
    assert adapted_penalty_coef(1.0, 0.6, target=1.0) == 0.5
    assert adapted_penalty_coef(1.0, 1.5, target=1.0) == 1.0


# The entropy's law

ENTROPY = {"target": 2.0, "rate": 0.01, "low": 0.001, "high": 0.02}


def test_the_step_of_the_entropy_bonus_by_hand():
    assert adapted_ent_coef(0.004, 1.0, **ENTROPY) == pytest.approx(0.009)  # half is missing
    assert adapted_ent_coef(0.004, 2.5, **ENTROPY) == pytest.approx(0.0015)
    assert adapted_ent_coef(0.004, 2.0, **ENTROPY) == 0.004
    assert adapted_ent_coef(0.015, 9.0, **ENTROPY) == pytest.approx(0.005)  # one rate at most


def test_the_entropy_bonus_leaves_0_and_stays_in_its_bounds():
    assert adapted_ent_coef(0.0, 1.0, **ENTROPY | {"low": 0.0}) == pytest.approx(0.005)
    assert adapted_ent_coef(0.019, 0.0, **ENTROPY) == 0.02
    assert adapted_ent_coef(0.002, 4.0, **ENTROPY) == 0.001


@pytest.mark.parametrize("entropy", [math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite_moves_nothing(entropy):
    assert adapted_ent_coef(0.004, entropy, **ENTROPY) == 0.004


@pytest.mark.parametrize("key", ["target", "rate"])
def test_senseless_settings_of_the_entropy_are_refused(key):
    with pytest.raises(ValueError, match=f"`{key}` must be above 0"):
        adapted_ent_coef(0.0, 1.0, **ENTROPY | {key: 0.0})


# Reward per KL


def test_slope_is_that_of_numpy():
    draw = random.Random(0)
    x, y = [[draw.gauss(5, 2) for _ in range(7)] for _ in range(2)]
    assert slope(x, y) == pytest.approx(np.polyfit(x, y, 1)[0], rel=1e-12)


def test_slope_of_a_line_and_of_what_has_none():
    assert slope([0.0, 1.0, 4.0], [1.0, 3.0, 9.0]) == 2.0
    for x in ([], [1.0], [2.0, 2.0, 2.0]):
        assert math.isnan(slope(x, x))
    with pytest.raises(ValueError, match="of one length, got 2 and 1"):
        slope([1.0, 2.0], [1.0])


def test_a_trend_is_told_from_first_to_last():
    trend = window_trend([1.0, 2.0, 3.0, 4.0], [0.0, 0.5, 1.0, 1.5])
    assert trend == pytest.approx((3.0, 1.5, 0.5))


LIMITS = {"spread": 2.0, "min_kl_growth": 1.0, "min_gain": 0.1, "slope_share": 0.5}


@pytest.mark.parametrize(
    ("trend", "best", "expected"),
    [
        ((0.9, 5.0, 1.0), None, "unclear"),
        ((-3.0, -5.0, 1.0), 1.0, "unclear"),
        ((math.nan, 1.0, 1.0), 1.0, "unclear"),
        ((1.0, 0.3, 0.3), None, "paid"),
        ((1.0, 0.2, 0.2), None, "stalled"),  # a tenth of the spread is not more than that
        ((1.0, -1.0, -1.0), None, "stalled"),
        ((1.0, 0.3, -0.1), None, "stalled"),
        ((1.0, 0.6, 0.6), 1.0, "paid"),
        ((1.0, 0.1, 0.5), 1.0, "paid"),
        ((1.0, 0.4, 0.4), 1.0, "fading"),
        ((1.0, -1.0, -1.0), 1.0, "fading"),
    ],
)
def test_what_the_kl_has_paid(trend, best, expected):
    assert payoff_of_kl(WindowTrend(*trend), best=best, **LIMITS) == expected


# Stops of the update


@pytest.mark.parametrize(
    ("stopped", "expected"),
    [
        ("", 0),
        ("11", 0),  # not a whole window yet
        ("101", 1),
        ("0011", 1),
        ("1100", 0),
        ("000", 0),  # not patient enough
        ("0000", -1),
        ("10000", -1),
        ("1000", 0),
    ],
)
def test_pressure(stopped, expected):
    flags = [letter == "1" for letter in stopped]
    assert pressure_on_update(flags, window=3, frequent=0.6, patience=4) == expected


RELIEF = {"num_epochs": (1, 4), "growth": 2.0, "max_factor": 4.0}


@pytest.mark.parametrize("first", ["epochs", "buffer"])
@given(steps=st.lists(st.sampled_from([-1, 0, 1]), max_size=30))
def test_relief_is_undone_in_reverse_and_keeps_its_bounds(first, steps):
    plan, taken = UpdatePlan(4, 1.0), []
    for pressure in steps:
        after = relieved_plan(plan, pressure=pressure, first=first, **RELIEF)
        assert 1 <= after.num_epochs <= 4
        assert 1 <= after.prompts_factor <= 4
        if pressure == -1:
            assert after == (taken.pop() if taken else plan)
        elif after != plan:
            assert pressure == 1
            assert (after.num_epochs != plan.num_epochs) != (
                after.prompts_factor != plan.prompts_factor
            )
            taken.append(plan)
        plan = after


def test_what_gives_way_first():
    start = UpdatePlan(4, 1.0)
    assert relieved_plan(start, pressure=1, first="epochs", **RELIEF) == (3, 1.0)
    assert relieved_plan(start, pressure=1, first="buffer", **RELIEF) == (4, 2.0)


def test_factors_are_multiplied_up_to_their_bound_on_either_side_of_one():
    assert further_cut(1.0, 0.1, bound=0.02) == pytest.approx(0.1)
    assert further_cut(0.1, 0.1, bound=0.02) == further_cut(0.02, 0.1, bound=0.02) == 0.02
    assert further_cut(1.0, 2.0, bound=4.0) == 2.0
    assert further_cut(2.0, 4.0, bound=4.0) == 4.0
    assert further_cut(1.0, 1.0, bound=4.0) == further_cut(1.0, 1.0, bound=0.1) == 1.0
    assert further_cut(1.0, 0.1, bound=1.0) == further_cut(1.0, 2.0, bound=1.0) == 1.0
