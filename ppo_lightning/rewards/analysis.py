"""How the scores of an iteration are distributed.

From all ranks' scores together, sorted first: the numbers do not depend on who held which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ppo_lightning.functional import Histogram, histogram

__all__ = ["Distribution", "Histogram", "distribution", "histogram"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
OUTLIER = 5.0
"""Robust z from which on a score is an outlier."""

# Makes the median of |x - median| the standard deviation of a normal distribution.
_NORMAL = 1.4826022185056018


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Moments and quantiles of some numbers; None where they do not have one.

    Args:
        count: How many there are.
        mean: Of all.
        std: Of the population.
        min: Smallest.
        q05: 5 % lie below; between two numbers the line is straight, as for those below.
        q25: A quarter lies below.
        median: Half lies below.
        q75: Three quarters lie below.
        q95: 95 % lie below.
        max: Largest.
        skew: Mean of z³, 0 where both sides are alike; None for a constant.
        kurtosis: Mean of z⁴, less the 3 of a normal distribution; None for a constant.
        outliers: How many are farther than 5 robust standard deviations from the median, which
            are 1.4826 times the median distance from it. None where that is 0: more than half are
            equal then, and there is no scale to measure the others by.
    """

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    q05: float | None = None
    q25: float | None = None
    median: float | None = None
    q75: float | None = None
    q95: float | None = None
    max: float | None = None
    skew: float | None = None
    kurtosis: float | None = None
    outliers: int | None = None

    def as_dict(self) -> dict[str, float]:
        """Return what there is, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def distribution(values: Sequence[float]) -> Distribution:
    """Describe some numbers.

    Args:
        values: Maybe none. What is not finite is left out.
    """
    x = _sorted(values)
    if not len(x):
        return Distribution(count=0)
    low, q05, q25, median, q75, q95, high = x.quantile(
        torch.tensor([0.0, *QUANTILES, 1.0], dtype=x.dtype)
    ).tolist()
    mean, std, skew, kurtosis = _moments(x)
    return Distribution(
        count=len(x),
        mean=mean,
        std=std,
        min=low,
        q05=q05,
        q25=q25,
        median=median,
        q75=q75,
        q95=q95,
        max=high,
        skew=skew,
        kurtosis=kurtosis,
        outliers=_outliers(x, median),
    )


def _sorted(values: Sequence[float]) -> Tensor:
    """Finite numbers in rising order, float64."""
    x = torch.tensor(values, dtype=torch.float64)
    return x[x.isfinite()].sort().values


def _moments(x: Tensor) -> tuple[float, float, float | None, float | None]:
    """Mean, deviation, skew and excess kurtosis of sorted numbers."""
    mean = math.fsum(x.tolist()) / len(x)
    if x[0] == x[-1]:
        return float(x[0]), 0.0, None, None
    centred = x - mean
    std = math.sqrt(float(centred.square().mean()))
    z = centred / std
    return mean, std, float(z.pow(3).mean()), float(z.pow(4).mean()) - 3


def _outliers(x: Tensor, median: float) -> int | None:
    distance = (x - median).abs()
    scale = _NORMAL * float(distance.quantile(0.5))
    return int((distance > OUTLIER * scale).sum()) if scale > 0 else None
