"""Masks of valid tokens, and the reductions that read nothing else.

Everything outside a mask may be any number at all, even nan. So each function selects first and
computes afterwards: multiplying by the mask would not do, since ``0 * nan`` is nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products with a tensor: autocast's where that is on; it spares float64."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Name the dtype in which ``x`` is to be summed: float64 stays, all else becomes float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or better; a tensor that already is comes back uncopied."""
    return x.to(accumulation_dtype(x))


def response_mask(response_ids: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """Mark each response up to and including its first end token.

    Good for responses whose recorded lengths are lost. A response that was cut by a stop string
    or by its own budget shows no end token, so rollouts record lengths and use
    ``mask_from_lengths`` instead.

    Args:
        response_ids: Sampled ids followed by padding of any id. ``[B, R]`` int.
        eos_token_ids: Every id that ends a response; may be empty.

    Returns:
        ``[B, R]`` bool; all True in a row without any end token.
    """
    ends = torch.isin(response_ids, response_ids.new_tensor(list(eos_token_ids)))
    ends_before = ends.cumsum(-1) - ends.long()
    return ends_before == 0


def mask_from_lengths(lengths: Tensor, width: int) -> Tensor:
    """Mark the first ``lengths[b]`` places of each row.

    Args:
        lengths: Number of valid tokens, 0 allowed. ``[B]`` int.
        width: Number of columns R, at least the largest length.

    Returns:
        ``[B, R]`` bool.
    """
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def last_index(mask: Tensor) -> Tensor:
    """Find the last True of each row, in a mask with or without holes.

    Args:
        mask: ``[B, R]`` bool.

    Returns:
        ``[B]`` int64, -1 for a row without any True.
    """
    if mask.shape[-1] == 0:
        return mask.new_full(mask.shape[:-1], -1, dtype=torch.long)
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (mask * places).amax(-1) - 1


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Add the values where ``mask`` is True, in float32 (float64 stays).

    Args:
        x: Values, bool or int or float. ``[B, R]``.
        mask: ``[B, R]`` bool.
        dim: Dimension to add over; None adds everything.

    Returns:
        A scalar, or ``x`` without ``dim``; 0 where nothing is valid, with a gradient of 0.
    """
    return x.masked_fill(~mask, 0).sum(dim=dim, dtype=accumulation_dtype(x))


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the values where ``mask`` is True; 0 where nothing is valid.

    A mean of one shard: over microbatches or ranks, add sums and counts instead of averaging
    the means (see ``ppo_lightning.functional.losses.aggregate``).

    Args:
        x: Values, bool or int or float. ``[B, R]``.
        mask: ``[B, R]`` bool.
        dim: Dimension to average over; None averages everything.

    Returns:
        A scalar, or ``x`` without ``dim``, float32 or float64.
    """
    return masked_sum(x, mask, dim) / mask.sum(dim=dim).clamp_min(1)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0, whichever side the padding is on.

    Args:
        attention_mask: True (or 1) on real tokens. ``[B, S]`` bool or int.

    Returns:
        ``[B, S]`` int64; padding repeats the number before it, or 0.
    """
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)
