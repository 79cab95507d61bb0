"""Bins of whole numbers and of places, by hand and against loops."""

import math
import random

import pytest
import torch

from ppo_lightning.functional import Histogram, sums_by_position, whole_histogram


def test_bins_of_whole_numbers_hold_equally_many():
    found = whole_histogram([3, 3, 4, 5, 9, 12], num_bins=4)
    # Ten numbers from 3 to 12, three a bin: the last one holds 12, and two that do not occur.
    assert found == Histogram(edges=(3.0, 6.0, 9.0, 12.0, 15.0), counts=(4, 0, 1, 1))


def test_few_whole_numbers_have_a_bin_each():
    assert whole_histogram([2, 4, 4]) == Histogram(edges=(2.0, 3.0, 4.0, 5.0), counts=(1, 0, 2))
    assert whole_histogram([7, 7]) == Histogram(edges=(7.0, 8.0), counts=(2,))
    assert whole_histogram([]) is None


@pytest.mark.parametrize("num_bins", [1, 2, 7, 16])
def test_no_whole_number_is_lost_or_counted_twice(num_bins):
    draw = random.Random(num_bins)
    for _ in range(30):
        values = [draw.randint(0, draw.choice([3, 40, 900])) for _ in range(50)]
        found = whole_histogram(values, num_bins=num_bins)
        assert len(found.counts) <= num_bins
        for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
            assert count == sum(low <= value < high for value in values)
        assert sum(found.counts) == 50


@pytest.mark.parametrize("padding", [math.nan, math.inf, 100.0])
def test_places_are_added_up_by_hand(padding):
    """Nothing at padding counts, nor in a hole."""
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [32.0, 64.0, 128.0, 256.0, 512.0]])
    mask = torch.tensor([[True, True, True, True, True], [True, False, True, False, False]])
    values = values.masked_fill(~mask, padding)
    sums, counts = sums_by_position(values, mask, num_bins=4)
    assert sums.tolist() == [33.0, 2.0, 140.0, 16.0]
    assert counts.tolist() == [2, 1, 3, 1]
    sums, counts = sums_by_position(values, mask, num_bins=3)  # the last one takes the rest
    assert sums.tolist() == [33.0, 2.0, 156.0]
    assert counts.tolist() == [2, 1, 4]


@pytest.mark.parametrize("width", [0, 1, 2, 3, 17, 40])
def test_each_place_is_in_the_bin_of_its_bit_length(width):
    mask = torch.ones(1, width, dtype=torch.bool)
    places = torch.arange(width)[None].float()
    sums, counts = sums_by_position(places, mask, num_bins=6)
    for number in range(6):
        members = [p for p in range(width) if min(p.bit_length(), 5) == number]
        assert (sums[number], counts[number]) == (sum(members), len(members))
