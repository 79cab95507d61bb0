"""How sure a mean over a few seeds is: intervals of Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean of independent numbers, with its 95 % interval.

    Args:
        mean: Of the numbers.
        num: How many there are.
        low: Lower end of the interval; None for a single number, which says nothing of its spread.
        high: Upper end.
    """

    mean: float
    num: int
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval, and 0 lies outside it."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean_of(values: Sequence[float], *, confidence: float = 0.95) -> Mean | None:
    """Return the mean of some numbers and its t interval.

    Args:
        values: One for each seed; for a paired comparison their differences.
        confidence: Probability of the interval, in (0, 1).

    Returns:
        None of no numbers. One number has no interval, and none is given where one is not finite.

    Source:
        Student 1908, "The probable error of a mean"; two-sided, n - 1 degrees of freedom.
    """
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return Mean(mean=mean, num=len(values))
    reach = t_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values)
    reach /= math.sqrt(len(values))
    return Mean(mean=mean, num=len(values), low=mean - reach, high=mean + reach)


def t_quantile(probability: float, freedom: int) -> float:
    """Return the number that Student's t stays below with a probability.

    Args:
        probability: In [0.5, 1).
        freedom: Degrees of freedom, a whole number of at least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0.5 <= probability < 1:
        raise ValueError(f"`probability` must lie in [0.5, 1), got {probability}.")
    if freedom < 1:
        raise ValueError(f"`freedom` must be at least 1, got {freedom}.")
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(200):  # halving ends long before, when the two are neighbours
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, freedom) < probability else (low, middle)
    return high


def _t_cdf(t: float, freedom: int) -> float:
    """Return P(T ≤ t) for t ≥ 0, by the finite sums for whole degrees of freedom.

    Source:
        Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2 == 1
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if freedom == 1:
        total = 0.0
    for k in range(2 if odd else 1, freedom - 1, 2):
        term *= cosine * cosine * k / (k + 1)
        total += term
    inside = math.sin(angle) * total
    if odd:
        inside = (angle + inside) * 2 / math.pi
    return 0.5 + inside / 2
