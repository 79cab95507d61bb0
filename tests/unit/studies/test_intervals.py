import math

import pytest

from ppo_lightning.studies import Mean, mean_of, t_quantile

# Two-sided 95 % and 99 %, of the printed tables (Fisher & Yates), by degrees of freedom.
TABLE = {
    0.975: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042},
    0.995: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 9: 3.250, 10: 3.169, 30: 2.750},
}


@pytest.mark.parametrize("probability", TABLE)
def test_quantiles_are_those_of_the_tables(probability):
    for freedom, expected in TABLE[probability].items():
        assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5.1e-4)


def test_quantiles_in_closed_form():
    assert t_quantile(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-9)  # Cauchy
    p = 0.975
    by_hand = (2 * p - 1) * math.sqrt(2 / (1 - (2 * p - 1) ** 2))  # two degrees of freedom
    assert t_quantile(p, 2) == pytest.approx(by_hand, rel=1e-9)
    assert t_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)
    assert t_quantile(0.975, 100_000) == pytest.approx(1.95996, abs=1e-4)  # the normal's


@pytest.mark.parametrize(("probability", "freedom"), [(1.0, 3), (0.2, 3), (0.9, 0)])
def test_quantiles_out_of_range(probability, freedom):
    with pytest.raises(ValueError, match="must"):
        t_quantile(probability, freedom)


def test_an_interval_by_hand():
    # mean 2, s = 1, s / √3 = 0.57735, t = 4.30265
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.mean, found.num) == (2.0, 3)
    assert found.low == pytest.approx(2 - 2.48414, abs=1e-5)
    assert found.high == pytest.approx(2 + 2.48414, abs=1e-5)
    assert not found.excludes_zero


def test_one_number_has_no_interval_and_none_no_mean():
    assert mean_of([3.0]) == Mean(mean=3.0, num=1)
    assert not mean_of([3.0]).excludes_zero
    assert mean_of([]) is None
    assert math.isnan(mean_of([1.0, math.nan]).mean)
    assert mean_of([1.0, math.nan]).low is None


def test_equal_numbers_have_an_interval_without_width():
    found = mean_of([0.5, 0.5])
    assert (found.low, found.high) == (0.5, 0.5)
    assert found.excludes_zero
