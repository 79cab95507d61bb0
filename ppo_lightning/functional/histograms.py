"""Numbers counted in bins, and tokens in bins of their place in the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts in bins of one width.

    Args:
        edges: Of the bins, rising; one more than there are bins. The last bin holds its upper
            edge, the others do not.
        counts: Numbers in each.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def histogram(values: Sequence[float], *, num_bins: int = 20) -> Histogram | None:
    """Count numbers in bins from the smallest to the largest.

    Args:
        values: What is not finite is left out.
        num_bins: All of one width; a constant gets a single one.

    Returns:
        None where there are no numbers.
    """
    x = torch.tensor(values, dtype=torch.float64)
    x = x[x.isfinite()]
    if not len(x):
        return None
    low, high = float(x.min()), float(x.max())
    if low == high:
        return Histogram(edges=(low, high), counts=(len(x),))
    edges = torch.linspace(low, high, num_bins + 1, dtype=x.dtype)
    edges[-1] = high
    return _counted(x, edges)


def whole_histogram(values: Sequence[int], *, num_bins: int = 20) -> Histogram | None:
    """Count whole numbers in bins that hold equally many of them.

    Bins from the smallest to the largest value would hold now one more, now one less, and show
    gaps that are not there.

    Args:
        values: Such as lengths.
        num_bins: At most so many, fewer where the values need no more; edges are whole numbers.

    Returns:
        None where there are no numbers.
    """
    if not values:
        return None
    low, beyond = min(values), max(values) + 1
    width = math.ceil((beyond - low) / num_bins)
    count = math.ceil((beyond - low) / width)
    edges = low + width * torch.arange(count + 1, dtype=torch.float64)
    return _counted(torch.tensor(values, dtype=torch.float64), edges)


def _counted(x: Tensor, edges: Tensor) -> Histogram:
    """Count numbers between the first and the last edge."""
    bins = torch.bucketize(x, edges[1:-1], right=True)
    counts = torch.bincount(bins, minlength=len(edges) - 1)
    return Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist()))


@torch.no_grad()
def sums_by_position(values: Tensor, mask: Tensor, *, num_bins: int) -> tuple[Tensor, Tensor]:
    """Add values up in bins of their column: 0, 1, 2–3, 4–7 and on, each twice as wide.

    Args:
        values: Of the tokens. ``[B, R]`` float.
        mask: Tokens that count; what stands elsewhere is not read. ``[B, R]`` bool.
        num_bins: At least 2; the last one holds all that lies beyond.

    Returns:
        ``(sums, counts)``, ``[num_bins]`` float64 each.
    """
    columns = torch.stack([values.double().masked_fill(~mask, 0).sum(0), mask.sum(0).double()])
    width = mask.shape[1]
    ends = [0, *(min(2**k, width) for k in range(num_bins - 1)), width]
    # Piece by piece: scattered sums are made in another order each time on a GPU.
    bins = [columns[:, first:last].sum(1) for first, last in pairwise(ends)]
    sums, counts = torch.stack(bins, 1)
    return sums, counts
