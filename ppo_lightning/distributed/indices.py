"""Which replica owns which response of an iteration."""

from __future__ import annotations

import torch
from torch import Tensor


def owned_indices(total: int, *, owner: int, owners: int) -> Tensor:
    """Global numbers that a replica owns: ``owner``, ``owner + owners`` and so on.

    Interleaved, so that they differ by one response at most, and the same response has the same
    number (and random numbers) whatever the number of owners.

    Args:
        total: Responses of all.
        owner: Number of the replica.
        owners: Replicas.

    Returns:
        ``[N]`` long, ascending.
    """
    return torch.arange(owner, total, owners)
