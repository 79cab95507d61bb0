"""Moments, quantiles, outliers and bins, by hand and against numpy."""

import math
import random

import numpy as np
import pytest

from ppo_lightning.functional import correlation
from ppo_lightning.rewards import Distribution, Histogram, distribution, histogram


def test_by_hand():
    # Mean 2, deviations -2, -1, 0, 0, 3: squares 14 / 5, cubes 18 / 5, fourth powers 98 / 5.
    found = distribution([2.0, 5.0, 0.0, 2.0, 1.0])
    assert (found.count, found.mean, found.min, found.median, found.max) == (5, 2.0, 0.0, 2.0, 5.0)
    assert found.std == pytest.approx(math.sqrt(2.8))
    assert (found.q25, found.q75) == (1.0, 2.0)
    assert found.q05 == pytest.approx(0.2)
    assert found.q95 == pytest.approx(4.4)
    assert found.skew == pytest.approx(3.6 / 2.8**1.5)
    assert found.kurtosis == pytest.approx(19.6 / 2.8**2 - 3)


def test_against_numpy():
    draw = random.Random(0)
    values = [draw.gauss(3, 2) for _ in range(400)]
    found = distribution(values)
    expected = np.quantile(values, [0.05, 0.25, 0.5, 0.75, 0.95])
    quantiles = [found.q05, found.q25, found.median, found.q75, found.q95]
    assert quantiles == pytest.approx(list(expected))
    z = (np.array(values) - np.mean(values)) / np.std(values)
    assert (found.skew, found.kurtosis) == pytest.approx((np.mean(z**3), np.mean(z**4) - 3))


def test_outliers_are_five_robust_deviations_away():
    # Median 0, median distance 1: outliers lie beyond 5 · 1.4826 = 7.413.
    values = [-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.5, -0.5]
    assert distribution([*values, 7.41, -7.41]).outliers == 0
    assert distribution([-1.0, 1.0, -1.0, 1.0, 0.0, -7.42, 7.42]).outliers == 2
    assert distribution([-1.0, 1.0, -1.0, 1.0, 0.0, -7.41, 7.42]).outliers == 1
    # One that is out of all proportion does not hide behind the spread that it makes itself.
    assert distribution([*values, 1e6]).outliers == 1


def test_sparse_scores_have_no_outliers_to_count():
    assert distribution([0.0] * 9 + [1.0]).outliers is None


@pytest.mark.parametrize("value", [0.1 + 0.2, -3.0, 1e30])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_constant(value, count):
    found = distribution([value] * count)
    assert (found.mean, found.std, found.min, found.median, found.max) == (value, 0.0, *[value] * 3)
    assert found.skew is found.kurtosis is found.outliers is None
    assert histogram([value] * count) == Histogram(edges=(value, value), counts=(count,))


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_no_numbers(values):
    assert distribution(values) == Distribution(count=0)
    assert distribution(values).as_dict() == {"count": 0}
    assert histogram(values) is None


def test_what_is_not_finite_is_left_out():
    values = [math.nan, 1.0, math.inf, 3.0]
    assert distribution(values) == distribution([1.0, 3.0])
    assert histogram(values) == histogram([1.0, 3.0])


def test_the_order_changes_no_bit():
    draw = random.Random(1)
    values = [draw.uniform(-1, 1) * 10 ** draw.randint(-6, 6) for _ in range(50)]
    shuffled = draw.sample(values, len(values))
    assert distribution(values) == distribution(shuffled)
    assert histogram(values) == histogram(shuffled)


def test_bins():
    found = histogram([0.0, 0.1, 0.24, 0.25, 0.5, 0.99, 1.0], num_bins=4)
    assert found.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert found.counts == (3, 1, 1, 2)
    values = [0.1 * i for i in range(37)]
    assert sum(histogram(values, num_bins=7).counts) == 37
    assert list(histogram(values, num_bins=7).counts) == list(np.histogram(values, 7)[0])


def test_correlation():
    assert correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert correlation([1.0, 2.0, 3.0], [1.0, 0.0, 1.0]) == pytest.approx(0, abs=1e-12)
    x, y = [1.0, 4.0, 2.0, 8.0], [3.0, 3.0, -1.0, 0.5]
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    for x, y in (([], []), ([1.0], [1.0]), ([2.0, 2.0], [1.0, 3.0]), ([1.0, 3.0], [2.0, 2.0])):
        assert math.isnan(correlation(x, y))
    with pytest.raises(ValueError, match="one length"):
        correlation([1.0], [])
