"""Moments over all ranks, and the whitening and score normalisation that use them.

Population variances throughout. The moments are computed in float64 and in two passes: the mean of
all ranks is found first and the deviations from it afterwards. ``E[x²] - E[x]²`` would lose
every digit of a small spread on a large mean. The second pass also mends the rounding of the mean,
so that values which are all equal give a mean equal to them and a variance of exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_lightning.functional.masking import accumulation_dtype

Reduce = Callable[[Tensor], Tensor]
"""Adds a 1-D float64 vector over all ranks. Every rank calls it equally often, empty or not."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and population variance of a pool of numbers; ``Moments()`` is the empty pool.

    Plain floats, so that a checkpoint can hold them. After ``ema_update`` ``count`` is the
    number of batches.
    """

    count: float = 0.0
    mean: float = 0.0
    var: float = 0.0


def identity(x: Tensor) -> Tensor:
    """Return ``x``: the reduction over ranks of a run on one process."""
    return x


def masked_moments(
    values: Tensor, mask: Tensor, *, reduce: Reduce = identity
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the moments of K quantities that share a mask, over all ranks.

    Args:
        values: ``[K, ...]`` float.
        mask: Valid places, with the shape of one quantity. ``[...]`` bool.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        ``(count, mean, var)``: a scalar and two ``[K]``, float64. All 0 if nothing is valid.
    """
    invalid = ~mask.flatten()
    x = values.detach().double().flatten(1).masked_fill(invalid, 0)  # [K, N]
    counted = reduce(torch.cat([mask.sum().double().unsqueeze(0), x.sum(1)]))
    count, divisor = counted[0], counted[0].clamp_min(1)
    mean = counted[1:] / divisor
    centred = (x - mean.unsqueeze(1)).masked_fill(invalid, 0)
    residue = reduce(torch.cat([centred.sum(1), centred.square().sum(1)])) / divisor
    slip, square = residue.chunk(2)
    return count, mean + slip, (square - slip.square()).clamp_min(0)


def moments(values: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity) -> Moments:
    """Compute count, mean and population variance of the valid values of all ranks.

    Args:
        values: Any shape, float.
        mask: Valid places; None when all are. Same shape, bool.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        Python floats; all 0 if nothing is valid.
    """
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    count, mean, var = masked_moments(values.unsqueeze(0), mask, reduce=reduce)
    return Moments(count.item(), mean.item(), var.item())


@torch.no_grad()
def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    eps: float = 1e-8,
    reduce: Reduce = identity,
    shift_mean: bool = True,
) -> Tensor:
    """Scale the valid tokens of the whole buffer, on all ranks, to unit variance.

    Done once over the buffer and not per minibatch: a leftover minibatch then changes nothing.

    Args:
        values: Advantages. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        eps: Added to the variance, under the root; above 0.
        reduce: Adds a vector over ranks; called twice.
        shift_mean: Centre at 0. False keeps the mean where it was.

    Returns:
        ``[B, R]`` float32 or float64, without gradient, 0 outside the mask. A single token, and
        tokens that are all equal, give exactly 0 (when centred).

    Source:
        Huang et al. 2023, "The N Implementation Details of RLHF with PPO".
    """
    _, mean, var = masked_moments(values.unsqueeze(0), mask, reduce=reduce)
    scaled = (values.double() - mean) * (var + eps).rsqrt()
    if not shift_mean:
        scaled = scaled + mean
    return scaled.masked_fill(~mask, 0).to(accumulation_dtype(values))


def zscore(
    scores: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8, reduce: Reduce = identity
) -> Tensor:
    """Normalise the scores of one batch by the batch's own moments, over all ranks.

    Args:
        scores: ``[B]`` float.
        mask: Scores that count towards the moments; None when all do. ``[B]`` bool.
        eps: Added to the standard deviation, outside the root; above 0.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        ``[B]``; exactly 0 for a single score or a constant batch.
    """
    return normalise(scores, moments(scores, mask, reduce=reduce), eps=eps)


@torch.no_grad()
def normalise(scores: Tensor, moments: Moments, *, eps: float = 1e-8) -> Tensor:
    """Compute ``(scores - mean) / (std + eps)`` with moments from anywhere.

    Args:
        scores: ``[B]`` float.
        moments: Of a batch, a pool, a moving average or a reference set.
        eps: Added to the standard deviation, outside the root; above 0.

    Returns:
        ``[B]`` float32 or float64, without gradient.
    """
    scaled = (scores.double() - moments.mean) / (math.sqrt(moments.var) + eps)
    return scaled.to(accumulation_dtype(scores))


def running_update(
    state: Moments, scores: Tensor, mask: Tensor | None = None, *, reduce: Reduce = identity
) -> Moments:
    """Add a batch to the pool of all scores so far.

    Args:
        state: The pool before; ``Moments()`` at the start.
        scores: This rank's share of the batch. ``[B]`` float.
        mask: Scores that count; None when all do. ``[B]`` bool.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        The pool with the batch in it. An empty batch leaves it alone.

    Source:
        Chan et al. 1983, "Algorithms for Computing the Sample Variance", eq. 2.1.
    """
    batch = moments(scores, mask, reduce=reduce)
    if batch.count == 0:
        return state
    count = state.count + batch.count
    share, shift = batch.count / count, batch.mean - state.mean
    var = state.var + share * (batch.var - state.var) + share * (1 - share) * shift**2
    return Moments(count, state.mean + share * shift, var)


def ema_update(
    state: Moments,
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    decay: float,
    bias_corrected: bool = False,
    reduce: Reduce = identity,
) -> Moments:
    """Move exponential averages of the batch moments one batch on.

    Plain form: mean and variance are averaged apart, starting with the first batch's.
    Bias-corrected form: the averages of x and x² start at 0 and are divided by ``1 - decay**k``,
    so that the drift between batches counts into the variance. It is computed as a merge with the
    weight ``(1 - decay) / (1 - decay**k)``, which is the same thing without the cancellation.

    Args:
        state: The averages before; ``Moments()`` at the start.
        scores: This rank's share of the batch. ``[B]`` float.
        mask: Scores that count; None when all do. ``[B]`` bool.
        decay: Weight of the past, in [0, 1).
        bias_corrected: Which of the two forms; a state belongs to one of them.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        The new averages, ``count`` being the number of batches. An empty batch leaves them alone.

    Raises:
        ValueError: ``decay`` is outside [0, 1).
    """
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must lie in [0, 1), got {decay}.")
    batch = moments(scores, mask, reduce=reduce)
    if batch.count == 0:
        return state
    count = state.count + 1
    weight = 1.0 if count == 1 else 1 - decay
    if bias_corrected:
        weight = (1 - decay) / (1 - decay**count)
    shift = batch.mean - state.mean
    var = state.var + weight * (batch.var - state.var)
    if bias_corrected:
        var += weight * (1 - weight) * shift**2
    return Moments(count, state.mean + weight * shift, var)
