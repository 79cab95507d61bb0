import math

import pytest

from ppo_lightning.functional import lr_factor


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warmup_rises_from_zero_to_one(schedule: str):
    factors = [
        lr_factor(step, warmup_steps=4, total_steps=12, schedule=schedule) for step in range(5)
    ]
    assert factors == [0, 0.25, 0.5, 0.75, 1]


def test_decays_reach_their_floor_and_stay_there():
    for schedule in ("linear", "cosine"):
        settings = {"warmup_steps": 0, "total_steps": 8, "schedule": schedule, "min_ratio": 0.25}
        assert lr_factor(0, **settings) == 1
        assert lr_factor(4, **settings) == pytest.approx(0.625)
        assert [lr_factor(step, **settings) for step in (8, 9, 16, 1000)] == [0.25] * 4


def test_cosine_is_above_linear_at_first():
    settings = {"warmup_steps": 0, "total_steps": 4}
    cosine = lr_factor(1, schedule="cosine", **settings)
    assert cosine == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert lr_factor(1, schedule="linear", **settings) == 0.75


def test_warmup_as_long_as_the_run_ends_at_the_floor():
    settings = {"warmup_steps": 4, "total_steps": 4, "schedule": "linear"}
    assert [lr_factor(step, **settings) for step in (3, 4)] == [0.75, 0]


def test_constant_needs_no_end_and_decays_do():
    assert lr_factor(10**9, warmup_steps=3, total_steps=None, schedule="constant") == 1
    with pytest.raises(ValueError, match="`total_steps` is needed by the 'linear' schedule"):
        lr_factor(5, warmup_steps=3, total_steps=None, schedule="linear")


def test_unknown_schedule_is_refused_even_in_warmup():
    with pytest.raises(ValueError, match="one of constant, linear, cosine, got 'cos'"):
        lr_factor(0, warmup_steps=3, total_steps=9, schedule="cos")  # type: ignore[arg-type]
