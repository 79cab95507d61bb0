"""Stages of several iterations are averaged, what is left is the rest, and shares are of all."""

import pytest

from ppo_lightning.callbacks import StageTime, Throughput, stage_table, stage_times
from ppo_lightning.metrics import IterationStats


def iteration(rollout, update, *, tokens, **more):
    stats = IterationStats(
        iteration=0,
        num_tokens=tokens,
        rollout_seconds=rollout,
        rollout_tokens_per_second=tokens / rollout,
        update_seconds=update,
        update_tokens_per_second=4 * tokens / update,
        **more,
    )
    return stats, 10.0


def test_means_shares_and_speeds():
    # Speeds are ratios of totals: 600 tokens in 3 s are 200, not the mean of 100 and 400.
    rows = stage_times([iteration(2.0, 4.0, tokens=200), iteration(1.0, 6.0, tokens=400)])
    assert rows == [
        StageTime(stage="rollout", seconds=1.5, share=0.15, tokens_per_second=200.0),
        StageTime(stage="update", seconds=5.0, share=0.5, tokens_per_second=240.0),
        StageTime(stage="rest", seconds=3.5, share=0.35),
        StageTime(stage="iteration", seconds=10.0, share=1.0, tokens_per_second=30.0),
    ]


def test_a_stage_of_some_iterations_is_spread_over_all():
    rows = stage_times(
        [iteration(1.0, 1.0, tokens=1), iteration(1.0, 1.0, tokens=1, validation_seconds=4.0)]
    )
    assert {row.stage: row.seconds for row in rows}["validation"] == 2.0


def test_the_table():
    rows = [
        StageTime(stage="rollout", seconds=1.23456, share=0.25, tokens_per_second=12345.6),
        StageTime(stage="rest", seconds=0.5, share=0.0123),
    ]
    assert stage_table(rows).splitlines()[2:] == [
        "| rollout | 1.23 | 25.0% | 12,346 |",
        "| rest | 0.5 | 1.2% |  |",
    ]


def test_a_count_below_zero_is_refused():
    with pytest.raises(ValueError, match="`num_warmup` must be at least 0, got -1"):
        Throughput(num_warmup=-1)
