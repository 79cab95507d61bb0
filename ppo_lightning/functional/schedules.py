"""Learning-rate factors and other coefficients as a function of the step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
Ramp = Literal["linear", "cosine", "step"]


def lr_factor(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int | None,
    schedule: Schedule,
    min_ratio: float = 0.0,
) -> float:
    """Compute what to multiply the base learning rate by: linear warm-up, then a decay.

    The factor of step 0 is 0 if there is a warm-up, so the first update is one of rate 0 unless
    the caller counts from 1.

    Args:
        step: Optimiser steps already taken (or planned and skipped).
        warmup_steps: Steps from 0 up to the full rate; 0 for none.
        total_steps: Steps until the decay ends, warm-up included. Past it the factor stays where it
            is. None with ``constant`` only.
        schedule: What follows the warm-up.
        min_ratio: Factor at the end of a decay.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: ``schedule`` is unknown, or a decay lacks ``total_steps``.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"`schedule` must be one of constant, linear, cosine, got {schedule!r}.")
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"`total_steps` is needed by the {schedule!r} schedule, got None.")
    # Share of the decay still to come, from 1 to 0; a cosine without this stop would rise again.
    left = max(0, total_steps - step) / max(1, total_steps - warmup_steps)
    if schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return min_ratio + (1 - min_ratio) * left


def ramp(
    step: int, *, start: float, end: float, length: int, delay: int = 0, kind: Ramp = "linear"
) -> float:
    """Compute a coefficient on its way from one value to another.

    Args:
        step: From 0.
        start: Value up to step ``delay``, exactly.
        end: Value from step ``delay + length`` on, exactly.
        length: Steps between the two, at least 1.
        delay: Steps before the way begins.
        kind: ``linear``, ``cosine`` (half a wave, level at both ends), or ``step`` (``start`` up to
            the end of the way, and ``end`` at once).

    Raises:
        ValueError: ``kind`` is unknown.
    """
    if kind not in ("linear", "cosine", "step"):
        raise ValueError(f"`kind` must be one of linear, cosine, step, got {kind!r}.")
    share = min(max((step - delay) / length, 0.0), 1.0)
    if kind == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    elif kind == "step":
        share = float(share == 1)
    return (1 - share) * start + share * end
