import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    group_moments,
    group_spread,
    group_zscore,
    in_flat_group,
    leave_one_out,
)
from tests.helpers.virtual_ranks import on_ranks

NAN = float("nan")


@pytest.mark.parametrize("num", [1, 3, 7])
@pytest.mark.parametrize("score", [0.7, 0.1, -1e6 / 3])
def test_t29_a_group_without_spread_is_exactly_zero(score: float, num: int):
    scores = torch.tensor([score] * num + [1.0, 2.0], dtype=torch.float64)
    groups = torch.tensor([3] * num + [0, 0])
    assert group_zscore(scores, groups)[:num].tolist() == [0.0] * num


def test_t33_a_group_of_one_is_exactly_zero():
    scores, mask = torch.tensor([3.5, 1.0, 9.0, NAN]), torch.tensor([True, True, False, False])
    # The second group has one score that counts, the third has none.
    assert group_zscore(scores, torch.tensor([0, 1, 1, 2]), mask).tolist() == [0.0] * 4


def test_groups_have_moments_of_their_own():
    scores = torch.tensor([1.0, 10.0, 3.0, 50.0, 5.0, NAN])
    mask = torch.tensor([True] * 5 + [False])
    found = group_zscore(scores, torch.tensor([0, 1, 0, 1, 0, 0]), mask)
    root = math.sqrt(1.5)  # 1, 3, 5: population variance 8 / 3
    assert_close(found[:5], torch.tensor([-root, -1.0, 0.0, 1.0, root]))


def test_groups_share_their_moments_over_ranks():
    scores = [torch.tensor([1.0, 10.0]), torch.tensor([3.0, 50.0, 7.0]), torch.tensor([])]
    groups = [torch.tensor([0, 6]), torch.tensor([0, 6, 9]), torch.tensor([]).long()]
    found = on_ranks(lambda reduce, k: group_zscore(scores[k], groups[k], reduce=reduce), 3)
    assert [part.tolist() for part in found] == [[-1.0, -1.0], [1.0, 1.0, 0.0], []]


def test_groups_of_a_small_spread_on_a_large_mean_keep_their_digits():
    scores = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    found = group_zscore(scores, torch.tensor([1, 1, 1]))
    assert found[2].item() == pytest.approx(math.sqrt(1.5), rel=1e-7)


@pytest.mark.parametrize(
    ("groups", "message"),
    [([0], r"\[2\] scores have \[1\] `groups`"), ([0, -1], "must count from 0, got -1")],
)
def test_groups_that_cannot_be(groups: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        group_zscore(torch.tensor([1.0, 2.0]), torch.tensor(groups))


SCORES = torch.tensor([1.0, 10.0, 4.0, 10.0, 7.0, NAN, 2.0])
GROUPS = torch.tensor([0, 1, 0, 1, 0, 0, 5])
MASK = torch.tensor([True] * 5 + [False, True])


def test_leave_one_out_takes_the_mean_of_the_others():
    found = leave_one_out(SCORES, GROUPS, MASK)
    # 1, 4, 7: against 5.5, 4 and 2.5; equal ones against each other; one alone against nothing.
    assert found.tolist() == [-4.5, 0.0, 0.0, 0.0, 4.5, 0.0, 0.0]
    assert found.dtype == torch.float32


def test_leave_one_out_knows_the_others_on_other_ranks():
    def on_rank(reduce, number):
        rows = slice(number, None, 2)
        return leave_one_out(SCORES[rows], GROUPS[rows], MASK[rows], reduce=reduce)

    found = on_ranks(on_rank, 2)
    assert found[0].tolist() == [-4.5, 0.0, 4.5, 0.0]
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_flat_groups_have_two_members_or_more_and_no_spread():
    found = in_flat_group(SCORES, GROUPS, MASK)
    assert found.tolist() == [False, True, False, True, False, False, False]


def test_the_spread_within_groups_leaves_lone_scores_out():
    compared, flat, spread = group_spread(SCORES, GROUPS, MASK)
    assert (compared, flat) == (2, 1)
    assert spread == pytest.approx(math.sqrt(6.0) / 2)  # of 1, 4, 7 and of 10, 10
    alone = group_spread(SCORES[-1:], GROUPS[-1:])
    assert alone[:2] == (0, 0)
    assert math.isnan(alone[2])


def test_moments_of_groups_without_members_are_zero():
    count, mean, var = group_moments(SCORES, GROUPS, MASK)
    assert count[:6].tolist() == [3, 2, 0, 0, 0, 1]
    assert mean[:6].tolist() == [4, 10, 0, 0, 0, 2]
    assert var[:6].tolist() == [6, 0, 0, 0, 0, 0]
