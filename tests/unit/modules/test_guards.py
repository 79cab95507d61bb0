"""The guards of the update, on numbers at their bounds."""

import warnings

import pytest
import torch

from ppo_lightning.errors import UpdateError
from ppo_lightning.metrics import IterationStats, metric_specs
from ppo_lightning.modules.guards import (
    MEAN_TOLERANCE,
    TOLERANCE,
    SamplerCheck,
    SelfCheck,
    SkipCounter,
    warn_of_idle_update,
)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_what_rounding_explains_passes_and_more_does_not(dtype):
    check, bound = SelfCheck("error"), TOLERANCE[dtype]
    check(0.99 * bound, 0.0, dtype)
    with pytest.raises(UpdateError, match=rf"\|log ratio\| reaches .* rounding in {dtype}"):
        check(1.01 * bound, 0.0, dtype)


@pytest.mark.parametrize("dtype", MEAN_TOLERANCE, ids=str)
def test_where_one_token_says_little_the_mean_decides(dtype):
    check, bound = SelfCheck("error"), MEAN_TOLERANCE[dtype]
    assert bound < TOLERANCE[dtype] / 10
    check(0.2, 0.99 * bound, dtype)
    with pytest.raises(UpdateError, match=f"in the mean, rounding in {dtype}"):
        check(0.2, 1.01 * bound, dtype)


def test_coarser_dtypes_are_given_more():
    order = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    bounds = [TOLERANCE[dtype] for dtype in order]
    assert bounds == sorted(bounds)


def test_the_metric_is_healthy_up_to_the_bound_of_bfloat16():
    found = metric_specs(IterationStats)["first_ratio_error"]
    assert found.healthy == (0.0, TOLERANCE[torch.bfloat16])


def test_warn_warns_and_off_is_silent():
    with pytest.warns(UserWarning, match="ratio is not 1 before the first update"):
        SelfCheck("warn")(1.0, 0.5, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SelfCheck("off")(1.0, 0.5, torch.float32)


def test_nan_is_left_to_the_guard_on_steps():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SelfCheck("error")(torch.nan, torch.nan, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 0.005),
        (torch.float32, 0.005),
        (torch.float16, 0.02),
        (torch.bfloat16, 0.05),
    ],
    ids=str,
)
def test_the_sampler_may_differ_by_rounding_and_says_more_once(dtype, bound):
    with pytest.raises(UpdateError, match=rf"`rollout/sampler_mismatch`.*{dtype} explains {bound}"):
        SamplerCheck("error")(1.01 * bound, dtype)
    SamplerCheck("off")(9.0, dtype)  # a warning would be an error here
    check = SamplerCheck("warn")
    for fine in (0.99 * bound, None, float("nan")):
        check(fine, dtype)
    with pytest.warns(UserWarning, match="differ from the trainer's"):
        check(1.01 * bound, dtype)
    check(2.0, dtype)


def test_skips_count_in_a_row_only():
    counter = SkipCounter(limit=3)
    for skipped in (True, True, False, True, True):
        assert not counter.count(skipped)
    assert counter.in_a_row == 2
    assert counter.count(True)
    with pytest.raises(UpdateError, match=r"3 optimiser steps in a row.*reward_processing\.clip"):
        raise counter.error()


NOTHING = {"steps_taken": 0.0, "num_responses": 8.0, "dropped_responses": 0.0, "num_tokens": 30.0}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"steps_skipped_nonfinite": 4.0}, "no loss and gradient was finite"),
        ({"dropped_responses": 8.0, "num_tokens": 0.0}, "every response was dropped"),
        ({"num_tokens": 0.0}, "no response counts: `reward_processing.mask_truncated`"),
        ({}, "no pass over the buffer was due"),
    ],
)
def test_an_update_that_trains_nothing_says_why(found, reason):
    with pytest.warns(UserWarning, match=f"took no optimiser step: {reason}"):
        warn_of_idle_update(IterationStats(iteration=3, **{**NOTHING, **found}))
