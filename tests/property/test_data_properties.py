"""What must hold for the order of any data set: a permutation, cut anywhere, on any machine."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lightning.data.prompts.mixture import mixed_order
from ppo_lightning.data.streams.streamed import streamed_order
from ppo_lightning.functional import combine_keys, permuted

QUICK = settings(max_examples=50, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


@QUICK
@given(size=st.integers(1, 3000), key=st.integers(-(2**63), 2**63 - 1))
def test_it_is_a_permutation_of_any_size(size, key):
    found = permuted(torch.arange(size), size, key=key)
    assert torch.equal(found.sort().values, torch.arange(size))


@QUICK
@given(size=st.integers(1, 2**62), key=SEEDS, data=st.data())
def test_it_stays_in_range_and_never_meets_itself(size, key, data):
    numbers = st.integers(0, size - 1)
    some = sorted(data.draw(st.sets(numbers, min_size=1, max_size=20)))
    found = permuted(torch.tensor(some), size, key=key).tolist()
    assert all(0 <= number < size for number in found)
    assert len(set(found)) == len(some)


@QUICK
@given(size=st.integers(1, 500), position=st.integers(0, 10**9), seed=SEEDS, data=st.data())
def test_a_stretch_may_be_cut_anywhere(size, position, seed, data):
    cut = data.draw(st.integers(0, 60))
    whole = streamed_order(size, position, 60, seed=seed)
    first = streamed_order(size, position, cut, seed=seed)
    assert first + streamed_order(size, position + cut, 60 - cut, seed=seed) == whole


@QUICK
@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5),
    position=st.integers(0, 10**6),
    seed=SEEDS,
)
def test_no_share_is_ever_off_by_more_than_the_number_of_parts(weights, position, seed):
    order = mixed_order(weights, position, 50, seed=seed)
    assert len(order) == 50
    total = sum(map(Fraction, weights))
    for part, weight in enumerate(weights):
        numbers = [number for chosen, number in order if chosen == part]
        if numbers:
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            due = (position * Fraction(weight) / total, (position + 50) * Fraction(weight) / total)
            assert due[0] - len(weights) - 1 < numbers[0]
            assert numbers[-1] < due[1] + len(weights)


def test_different_keys_give_different_permutations():
    found = {
        tuple(permuted(torch.arange(50), 50, key=combine_keys(seed)).tolist()) for seed in range(50)
    }
    assert len(found) == 50


def test_neighbours_are_torn_apart():
    # Of 10,000 random numbers one is a neighbour of the one before in two cases, on average.
    found = permuted(torch.arange(10_000), 10_000, key=7)
    assert int(((found[1:] - found[:-1]).abs() == 1).sum()) < 15


@pytest.mark.parametrize(
    ("indices", "size", "match"),
    [
        (torch.tensor([5]), 5, "lie in"),
        (torch.tensor([-1]), 5, "lie in"),
        (torch.tensor([0]), 0, "`size`"),
        (torch.tensor([0.0]), 5, "int64"),
    ],
)
def test_numbers_out_of_range_are_refused(indices, size, match):
    with pytest.raises(ValueError, match=match):
        permuted(indices, size, key=0)
