"""Numbers that describe a buffer: the critic's fit, the policy's movement, the texts' variety.

And how sure a mean is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ppo_lightning.functional.kl import KLEstimator, kl_estimate
from ppo_lightning.functional.masking import masked_sum
from ppo_lightning.functional.normalize import Reduce, identity, masked_moments

Ids = Sequence[int]


@torch.no_grad()
def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, reduce: Reduce = identity
) -> Tensor:
    """Compute 1 - Var(G - V) / Var(G) over the valid tokens of all ranks.

    1 is a perfect critic, 0 one no better than a constant, below 0 worse than that. A constant
    offset of the critic does not lower it.

    Args:
        values: V before the update. ``[B, R]`` float.
        returns: G. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        reduce: Adds a vector over ranks; called twice.

    Returns:
        A float64 scalar; nan where the returns do not vary.
    """
    _, _, var = masked_moments(torch.stack([returns, returns - values]), mask, reduce=reduce)
    return torch.where(var[0] > 0, 1 - var[1] / var[0], torch.nan)


@torch.no_grad()
def approx_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: KLEstimator = "k3",
    reduce: Reduce = identity,
) -> Tensor:
    """Estimate KL(π_old ‖ π) per token, from tokens that π_old sampled.

    Args:
        logprobs: Of the policy being trained. ``[B, R]`` float.
        old_logprobs: Of the policy that sampled. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        estimator: See ``ppo_lightning.functional.kl.kl_estimate``.
        reduce: Adds a vector over ranks; called once.

    Returns:
        A float64 scalar: the mean over valid tokens of all ranks, in nats; 0 if there are none.
    """
    kl = kl_estimate(old_logprobs, logprobs, estimator=estimator)
    summed = reduce(torch.stack([masked_sum(kl, mask).double(), mask.sum().double()]))
    return summed[0] / summed[1].clamp_min(1)


def _ngrams(ids: Ids, n: int) -> Iterator[tuple[int, ...]]:
    return zip(*(ids[k:] for k in range(n)), strict=False)


def repeated_ngram_fraction(ids: Ids, n: int = 2) -> float:
    """Compute the share of n-grams that already occurred earlier in the same response.

    Args:
        ids: Token ids of one response.
        n: Length of an n-gram.

    Returns:
        From 0 (no repetition, or shorter than n) towards 1.
    """
    total = max(0, len(ids) - n + 1)
    return 1 - len(set(_ngrams(ids, n))) / total if total else 0.0


def distinct_ngrams(responses: Sequence[Ids], n: int) -> float:
    """Compute distinct-n: different n-grams of all responses, divided by all their n-grams.

    It falls as the number of responses grows: compare equal numbers only.

    Args:
        responses: Token ids of each response.
        n: Length of an n-gram.

    Returns:
        Above 0 and up to 1 (no n-gram occurs twice, or there is none).

    Source:
        Li et al. 2016, arXiv:1510.03055, sec. 5.2.
    """
    total = sum(max(0, len(ids) - n + 1) for ids in responses)
    distinct = {ngram for ids in responses for ngram in _ngrams(ids, n)}
    return len(distinct) / total if total else 1.0


def _openings(responses: Sequence[Ids], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[:n]) for ids in responses if len(ids) > 0)


def opening_share(responses: Sequence[Ids], n: int = 4) -> float:
    """Compute the share of responses that begin with the most frequent opening.

    Args:
        responses: Token ids of each response. Empty ones are left out; one shorter than n is its
            own opening.
        n: Tokens in an opening.

    Returns:
        Up to 1, when all begin alike; 0 without responses.
    """
    openings = _openings(responses, n)
    return max(openings.values()) / openings.total() if openings else 0.0


def distinct_openings(responses: Sequence[Ids], n: int = 4) -> float:
    """Compute the number of different openings, divided by that of responses.

    Args:
        responses: Token ids of each response, as in ``opening_share``.
        n: Tokens in an opening.

    Returns:
        Up to 1, when no two begin alike; 0 without responses.
    """
    openings = _openings(responses, n)
    return len(openings) / openings.total() if openings else 0.0


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Compute Pearson's correlation of pairs of numbers.

    Args:
        x: Of each pair.
        y: Of each pair; as many.

    Returns:
        From -1 to 1; nan where either is constant, or there is no pair.

    Raises:
        ValueError: The two differ in length.
    """
    if len(x) != len(y):
        raise ValueError(f"`x` and `y` must be of one length, got {len(x)} and {len(y)}.")
    if not x or min(x) == max(x) or min(y) == max(y):
        return math.nan
    table = torch.tensor([x, y], dtype=torch.float64)
    centred = table - table.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    return float((unit[0] @ unit[1]).clamp(-1, 1))


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Bound the mean of some independent numbers by resampling them (percentile bootstrap).

    For a paired comparison give the differences, one for each prompt: several answers to one
    prompt are not independent, so their mean comes first.

    Args:
        values: At least one.
        confidence: Probability of the interval, in (0, 1).
        num_resamples: Times that as many numbers are drawn with replacement.
        seed: Of the draws: the same numbers give the same interval.

    Returns:
        ``(low, high)``. One number alone gives itself twice, which says nothing of its spread.

    Raises:
        ValueError: There is no number, or ``confidence`` is out of range.

    Source:
        Efron & Tibshirani 1993, "An Introduction to the Bootstrap", ch. 13.
    """
    if not values:
        raise ValueError("`values` must hold at least one number, got none.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must lie in (0, 1), got {confidence}.")
    numbers = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(numbers), (num_resamples, len(numbers)), generator=generator)
    tail = (1 - confidence) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = numbers[draws].mean(1).quantile(ends).tolist()
    return low, high
