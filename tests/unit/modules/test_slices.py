"""Slices of a buffer, by hand: responses, places, groups of prompts."""

import math
import random
from dataclasses import replace

import pytest
import torch

from ppo_lightning.functional import Histogram
from ppo_lightning.metrics import MOST_GROUPS, GroupStats, PositionStats, Sums
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.slices import (
    SUMS_BY_POSITION,
    ResponseRow,
    buffer_histograms,
    group_stats,
    position_stats,
    position_totals,
    response_rows,
)
from ppo_lightning.rewards import RewardResult
from ppo_lightning.rollout import Freshness, ShapedRollout, completions_of
from tests.helpers.buffers import experience_of, network_scores, rollout_of
from tests.helpers.scripted import Letters

RESPONSES = [[3, 3, 3, 3], [5, 6], [7, 8, 9], [4]]
ENTROPY = [[1.0, 2.0, 3.0, 4.0], [0.5, 0.25], [9.0, 9.0, 9.0], [8.0]]
GROUPS = ["sums", "part 1", "sums", "sums"]


def collected(padding=math.nan):
    """Four responses: the third is dropped, the fourth in no loss; padding is what is given."""
    rollout = rollout_of(RESPONSES)
    records = [
        replace(record, group=group)
        for record, group in zip(rollout.prompts.records, GROUPS, strict=True)
    ]
    rollout = replace(rollout, prompts=replace(rollout.prompts, records=tuple(records)))
    entropy = torch.full(rollout.response_mask.shape, padding)
    for row, values in enumerate(ENTROPY):
        entropy[row, : len(values)] = torch.tensor(values)
    kept = torch.tensor([True, True, False, True])
    mask = rollout.response_mask & torch.tensor([True, True, False, False])[:, None]
    result = RewardResult(
        scores=torch.zeros(4),
        raw=torch.tensor([1.0, -2.0, math.nan, 4.0]),
        components={},
        weights={},
        dropped=~kept,
        clipped=kept,
    )
    return Collected(
        rollout=rollout,
        completions=completions_of(rollout, Letters()),
        result=result,
        networks=network_scores(rollout, entropy=entropy),
        shaped=ShapedRollout(rewards=mask * 0.0, raw_advantages=mask * 0.0, mask=mask),
        experience=experience_of(rollout.sequences),
        kept=kept,
        nonfinite=~kept,
        freshness=Freshness.of_current(rollout),
        returning=False,
    )


def row(score=0.0, group="", *, length=1, repeated=0.0, entropy=0.0, tokens=1):
    return ResponseRow(score, length, repeated, group, entropy, tokens)


@pytest.mark.parametrize("padding", [math.nan, math.inf, 50.0])
def test_rows_are_those_in_the_buffer_with_the_tokens_that_losses_count(padding):
    assert response_rows(collected(padding)) == [
        row(1.0, "sums", length=4, repeated=pytest.approx(2 / 3), entropy=10.0, tokens=4),
        row(-2.0, "part 1", length=2, entropy=0.75, tokens=2),
        row(4.0, "sums", length=1, entropy=0.0, tokens=0),
    ]


@pytest.mark.parametrize("padding", [math.nan, math.inf, 50.0])
def test_entropy_by_place_weighs_every_token_alike(padding):
    totals = Sums(SUMS_BY_POSITION)
    totals.add(**position_totals(collected(padding)))
    assert position_stats(totals.compute()) == {
        "0": PositionStats(mean=0.75),  # 1 and 0.5
        "1": PositionStats(mean=1.125),  # 2 and 0.25
        "2-3": PositionStats(mean=3.5),  # 3 and 4
    }


def test_groups_are_means_over_their_responses_and_tokens():
    assert group_stats(response_rows(collected())) == {
        "sums": GroupStats(entropy=2.5, score=2.5, num_responses=2.0),
        "part_1": GroupStats(entropy=0.375, score=-2.0, num_responses=1.0),
    }


def test_without_a_mixture_there_are_no_groups():
    assert group_stats([row(), row(3.0)]) == {}


def test_a_group_without_a_token_in_the_losses_has_no_entropy():
    [found] = group_stats([row(3.0, "a", tokens=0)]).values()
    assert found == GroupStats(score=3.0, num_responses=1.0)


def test_the_largest_groups_are_kept_and_of_equal_ones_the_first_by_name():
    rows = [row(group=f"g{n:02}") for n in range(MOST_GROUPS + 4)]
    rows += [row(group="g19"), row(group="g18")]
    found = group_stats(rows)
    assert [*found] == ["g18", "g19", *(f"g{n:02}" for n in range(MOST_GROUPS - 2))]


def test_the_order_of_responses_changes_no_bit():
    """T42: whoever holds which."""
    draw = random.Random(0)
    rows = [
        row(draw.gauss(0, 1) * 10 ** draw.randint(-6, 6), draw.choice("ab"), entropy=draw.random())
        for _ in range(60)
    ]
    assert group_stats(rows) == group_stats(sorted(rows, key=lambda r: r.entropy))


def test_scores_and_lengths_are_counted():
    rows = [row(s, length=n) for s, n in [(0.0, 2), (1.0, 2), (16.0, 40), (0.5, 3)]]
    found = buffer_histograms(rows, iteration=3)
    assert found.iteration == 3
    assert found.raw_score == Histogram(
        edges=tuple(float(n) for n in range(17)), counts=(2, 1, *[0] * 12, 0, 1)
    )
    # 39 numbers from 2 to 40 in bins of three.
    assert found.response_length.edges == tuple(float(n) for n in range(2, 42, 3))
    assert found.response_length.counts == (3, *[0] * 11, 1)
    assert buffer_histograms([], iteration=0).raw_score is None
