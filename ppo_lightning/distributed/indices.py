"""Which rank owns which response of an iteration."""

from __future__ import annotations

import torch
from torch import Tensor


def owned_indices(total: int, *, rank: int, world_size: int) -> Tensor:
    """Global numbers that a rank owns: ``rank``, ``rank + world_size`` and so on.

    Interleaved, so that ranks differ by one response at most, and the same response has the same
    number (and random numbers) whatever the number of ranks.

    Returns:
        ``[N]`` long, ascending.
    """
    return torch.arange(rank, total, world_size)
