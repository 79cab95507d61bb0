"""Attention over packed rows on a CUDA device: FlashAttention, told where each sequence begins.

The kernel is torch's own, or that of the package ``flash_attn`` where torch is too old to have one
with a scale and a window. Tokens that several sequences share are read by each as keys; as queries
they stay in the first of them, and the others' come at the end of their keys, where the kernel
expects them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ppo_lightning.functional import product_dtype

if TYPE_CHECKING:
    from ppo_lightning.models.attention import Packing

Kernel = Callable[..., Tensor]
"""Called as ``torch.nn.attention.varlen.varlen_attn`` is."""

_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # of a head
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Bounds:
    """Where sequences begin and end among queries and keys.

    Args:
        queries: First query of each sequence, and the number of all. ``[B + 1]`` int32.
        keys: Likewise of the keys. ``[B + 1]`` int32.
        order: Token of each key; None where tokens and keys are one. ``[K]`` long.
    """

    queries: Tensor
    keys: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, packing: Packing, device: torch.device) -> Bounds:
        """Make them, without waiting for the device."""
        lengths = torch.tensor(packing.lengths)
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        keys = ends.int().to(device, non_blocking=True)
        if packing.tokens is None:
            return cls(keys, keys, None)
        assert packing.cells is not None
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        cells = rows * packing.width + torch.arange(len(rows)) - ends[rows]
        starts = torch.arange(len(lengths) + 1, device=device) * packing.width
        return cls(
            torch.searchsorted(packing.cells, starts).int(),
            keys,
            packing.tokens[cells.to(device, non_blocking=True)],
        )


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel is there and knows such heads; ``[1, heads, T, d]`` each."""
    size = query.shape[-1]
    known = size == value.shape[-1] and size % 8 == 0 and size <= _WIDEST
    if not (query.is_cuda and known and product_dtype(query) in _HALF):
        return False
    return torch.cuda.get_device_capability(query.device) >= _AMPERE and kernel() is not None


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Let each token see the tokens before it in its own sequence.

    Args:
        query: ``[1, heads, T, d]``.
        key: Of fewer heads, maybe.
        value: Likewise.
        packing: Of the T tokens.
        scaling: Factor on the products; None is 1/sqrt(d).
        window: How many tokens a token sees, itself included; None is all.

    Returns:
        ``[1, T, heads, d]``.
    """
    attention, bounds = kernel(), packing.bounds(query.device)
    assert attention is not None
    dtype, width = product_dtype(query), packing.width
    tokens, keys, values = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    if bounds.order is not None:
        keys, values = (x.index_select(0, bounds.order) for x in (keys, values))
    seen = attention(
        tokens, keys, values, bounds.queries, bounds.keys, width, width,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return seen[None]


@cache
def kernel() -> Kernel | None:
    """Find the kernel: torch's own, else the package's."""
    return _of_torch() or _of_package()


def _of_torch() -> Kernel | None:
    try:
        found: Kernel = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    known = inspect.signature(found).parameters
    return found if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


def _of_package() -> Kernel | None:
    try:
        return partial(_translated, import_module("flash_attn").flash_attn_varlen_func)
    except (ImportError, AttributeError):
        return None


def _translated(
    function: Kernel, *tensors_and_lengths: Any, scale: float | None, enable_gqa: bool, **rest: Any
) -> Tensor:
    """Call the package's kernel by the names of torch's; it knows shared heads without a word."""
    return function(*tensors_and_lengths, softmax_scale=scale, causal=True, **rest)
