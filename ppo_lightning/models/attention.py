"""Attention over rows that lie one after the other, without padding.

All layers of a decoder but one work token by token, so the tokens of a batch may lie in one long
row, and padding need not be computed. Only attention must know which token belongs to which row.
It is registered with transformers under a name of its own and does what ``sdpa`` does unless a
``packing`` comes along with the call: models hand such arguments on to their attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "ppo_lightning"
"""Name of this attention in a model's config."""

# What some families' attention takes besides.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "indices")


@dataclass(frozen=True)
class Packing:
    """Which token of a packed row belongs to which sequence.

    Sequences that begin alike may share those tokens.

    Args:
        lengths: Tokens of each sequence, in their order. At least one sequence.
        cells: Place of each token in the grid of sequences, ``[len(lengths), width]`` read row by
            row, the first of its places if it has several; None where every sequence fills its row
            and none is shared. ``[T]`` long.
        tokens: Token that stands in each cell of the grid, any one behind the end of a sequence;
            None where none is shared. ``[len(lengths) * width]`` long.
    """

    lengths: tuple[int, ...]
    cells: Tensor | None
    tokens: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor) -> Packing:
        """Lay sequences of some lengths one after the other.

        Args:
            lengths: ``[B]`` long.
        """
        listed = tuple(lengths.tolist())
        width = max(listed)
        if min(listed) == width:
            return cls(listed, None)
        taken = torch.arange(width, device=lengths.device) < lengths[:, None]
        return cls(listed, taken.flatten().nonzero()[:, 0])

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Let each token see the tokens before it in its own sequence; the attention of a layer.

    Args:
        module: The layer.
        query: ``[1, heads, T, d]``; without a packing ``[B, heads, S, d]``.
        key: Of fewer heads, maybe.
        value: Likewise.
        attention_mask: Not read where there is a packing.
        packing: Of the T tokens.
        scaling: Factor on the products; None is 1/sqrt(d).
        sliding_window: How many tokens a token sees, itself included.
        options: Of ``sdpa``.

    Returns:
        ``[1, T, heads, d]``, and None for the weights.
    """
    if packing is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask,
            scaling=scaling, sliding_window=sliding_window, **options,
        )  # fmt: skip
    if any(options.get(name) is not None for name in _UNKNOWN) or options.get("dropout"):
        raise ValueError(f"packed rows know none of dropout, {', '.join(_UNKNOWN)}")
    mask = _band(packing.width, sliding_window, query.device)
    seen = scaled_dot_product_attention(
        _spread(query, packing),
        _spread(key, packing),
        _spread(value, packing),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return _gathered(seen, packing), None


def _spread(heads: Tensor, packing: Packing) -> Tensor:
    """Give each sequence a row of its own. ``[1, h, T, d]`` to ``[B, h, width, d]``."""
    tokens = heads[0].transpose(0, 1)
    if packing.tokens is not None:
        tokens = tokens.index_select(0, packing.tokens)
    elif packing.cells is not None:
        count = len(packing.lengths) * packing.width
        tokens = _Scatter.apply(tokens, packing.cells, count)  # type: ignore[no-untyped-call]
    rows = tokens.reshape(len(packing.lengths), packing.width, *tokens.shape[1:])
    return rows.transpose(1, 2)


def _gathered(seen: Tensor, packing: Packing) -> Tensor:
    """Undo ``_spread``, heads behind tokens. ``[B, h, width, d]`` to ``[1, T, h, d]``."""
    tokens = seen.transpose(1, 2).flatten(0, 1)
    if packing.cells is not None:
        tokens = _Gather.apply(tokens, packing.cells)  # type: ignore[no-untyped-call]
    return tokens[None]


def _band(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """What a token sees of its row where it does not see all that came before. ``[W, W]`` bool."""
    if window is None or window >= width:
        return None
    seen = torch.ones(width, width, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window)


class _Scatter(torch.autograd.Function):
    """Rows to their places, zero elsewhere; backward is a copy where autograd would add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, cells: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(cells)
        return tokens.new_zeros(count, *tokens.shape[1:]).index_copy_(0, cells, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (cells,) = ctx.saved_tensors
        return grads[0].index_select(0, cells), None, None


class _Gather(torch.autograd.Function):
    """Rows from their places, each of which is asked for once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cells: Tensor) -> Tensor:
        ctx.save_for_backward(cells)
        ctx.count = len(rows)
        return rows.index_select(0, cells)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cells,) = ctx.saved_tensors
        given = grads[0]
        return given.new_zeros(ctx.count, *given.shape[1:]).index_copy_(0, cells, given), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
