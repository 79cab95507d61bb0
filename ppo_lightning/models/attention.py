"""Attention over rows that lie one after the other, without padding.

All layers of a decoder but one work token by token, so the tokens of a batch may lie in one long
row, and padding need not be computed. Only attention must know which token belongs to which row.
It is registered with transformers under a name of its own and does what ``sdpa`` does unless a
``packing`` comes along with the call: models hand such arguments on to their attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppo_lightning.functional import accumulation_dtype, product_dtype
from ppo_lightning.models.attention_cuda import Bounds, attend_varlen, takes_varlen

ATTENTION = "ppo_lightning"
"""Name of this attention in a model's config."""

# What ``scaled_dot_product_attention`` calls on a CPU; it also returns what backward needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

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
    _bounds: dict[torch.device, Bounds] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device | None = None) -> Packing:
        """Lay sequences of some lengths one after the other.

        Args:
            lengths: ``[B]`` long.
            device: Where the cells are wanted; None is that of the lengths.
        """
        listed = tuple(lengths.tolist())
        width = max(listed)
        if min(listed) == width:
            return cls(listed, None)
        taken = torch.arange(width, device=lengths.device) < lengths[:, None]
        cells = taken.flatten().nonzero()[:, 0]
        return cls(listed, cells.to(device or lengths.device, non_blocking=True))

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def bounds(self, device: torch.device) -> Bounds:
        """Where sequences begin and end, made once for all layers on a device."""
        if device not in self._bounds:
            self._bounds[device] = Bounds.of(self, device)
        return self._bounds[device]


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
    if _goes_in_turn(query, value, packing, sliding_window):
        query, key, value = (_as_read(x, query) for x in (query, key, value))
        seen = _InTurn.apply(query, key, value, packing.lengths, scaling)  # type: ignore[no-untyped-call]
        return seen, None
    if takes_varlen(query, value):
        seen = attend_varlen(query, key, value, packing, scaling=scaling, window=sliding_window)
        return seen, None
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
        tokens = scattered_rows(tokens, packing.cells, count)
    rows = tokens.reshape(len(packing.lengths), packing.width, *tokens.shape[1:])
    return rows.transpose(1, 2)


def _gathered(seen: Tensor, packing: Packing) -> Tensor:
    """Undo ``_spread``, heads behind tokens. ``[B, h, width, d]`` to ``[1, T, h, d]``."""
    tokens = seen.transpose(1, 2).flatten(0, 1)
    if packing.cells is not None:
        tokens = gathered_rows(tokens, packing.cells)
    return tokens[None]


def _band(width: int, window: int | None, device: torch.device) -> Tensor | None:
    """What a token sees of its row where it does not see all that came before. ``[W, W]`` bool."""
    if window is None or window >= width:
        return None
    seen = torch.ones(width, width, dtype=torch.bool, device=device)
    return seen.tril().triu(1 - window)


def _goes_in_turn(query: Tensor, value: Tensor, packing: Packing, window: int | None) -> bool:
    """Whether sequences are attended to one after the other: quick where calls cost little.

    What is asked here is what ``scaled_dot_product_attention`` asks before it calls the kernel.
    """
    whole = window is None or window >= packing.width
    known = query.shape[-1] == value.shape[-1] and min(packing.lengths) > 0
    return query.device.type == "cpu" and packing.tokens is None and whole and known


def _as_read(heads: Tensor, query: Tensor) -> Tensor:
    """Return what the kernel reads: as many heads as the query has. ``[1, heads, T, d]``."""
    heads = heads.to(product_dtype(query))
    repeats = query.shape[1] // heads.shape[1]
    if repeats > 1:
        heads = heads.repeat_interleave(repeats, dim=1)
    return heads if heads.stride(-1) == 1 else heads.contiguous()


class _InTurn(torch.autograd.Function):
    """Attention on a CPU, one sequence after the other.

    Nothing is computed for a shorter neighbour, and nothing is moved. The backward pass is in
    float32 at least: the kernel in bfloat16 takes five times as long.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float | None,
    ) -> Tensor:
        sums = []

        def attended(*inputs: Tensor) -> tuple[Tensor]:
            found, log_sum = _flash(*inputs, 0.0, True, scale=scale)
            sums.append(log_sum)
            return (found,)

        parts = zip(*(_sequences(x, lengths) for x in (query, key, value)), strict=True)
        (seen,) = _laid_out(starmap(attended, parts), (query,), lengths)
        ctx.save_for_backward(query, key, value, seen, *sums)
        ctx.settings = lengths, scale
        return seen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, *sums = ctx.saved_tensors
        lengths, scale = ctx.settings
        exact = accumulation_dtype(query)
        known = (grads[0].transpose(1, 2), query, key, value, seen.transpose(1, 2))
        inputs = [_sequences(x.to(exact), lengths) for x in known]
        results = (
            _flash_backward(*parts, log_sum, 0.0, True, scale=scale)
            for log_sum, *parts in zip(sums, *inputs, strict=True)
        )
        wanted = _laid_out(results, (query, key, value), lengths)
        return *(x.transpose(1, 2) for x in wanted), None, None


def _sequences(heads: Tensor, lengths: tuple[int, ...]) -> Sequence[Tensor]:
    """Look at each sequence, at all of them where they are of one length.

    Args:
        heads: ``[1, h, T, d]``.
        lengths: Tokens of each sequence.

    Returns:
        ``[1, h, length, d]`` each, or one ``[B, h, length, d]``.
    """
    if min(lengths) < max(lengths):
        return torch.split(heads, list(lengths), dim=2)
    count, size = heads.shape[1], heads.shape[3]
    return [heads.view(count, len(lengths), lengths[0], size).transpose(0, 1)]


def _laid_out(
    results: Iterable[Sequence[Tensor]], like: Sequence[Tensor], lengths: tuple[int, ...]
) -> list[Tensor]:
    """Undo ``_sequences`` on what is computed of each, heads behind tokens, as it lies already.

    Where there is something to copy, that is done as soon as it is there, while it is in the cache.

    Args:
        results: Of the sequences in turn, or of all at once: ``[1, h, length, d]`` or
            ``[B, h, length, d]`` for each of ``like``.
        like: Whose dtype is wanted. ``[1, h, T, d]`` each.
        lengths: Tokens of each sequence.

    Returns:
        ``[1, T, h, d]`` for each of ``like``.
    """
    if min(lengths) == max(lengths):
        (found,) = results
        rows = (x.transpose(1, 2).flatten(0, 1)[None] for x in found)
        return [x.to(given.dtype) for x, given in zip(rows, like, strict=True)]
    whole = [x.new_empty(x.transpose(1, 2).shape) for x in like]
    places = [_sequences(x.transpose(1, 2), lengths) for x in whole]
    for found, *parts in zip(results, *places, strict=True):
        for part, x in zip(parts, found, strict=True):
            part.copy_(x)
    return whole


def scattered_rows(rows: Tensor, cells: Tensor, count: int, *, fill: float = 0.0) -> Tensor:
    """Put rows in their places.

    Args:
        rows: ``[N, ...]``.
        cells: Place of each, all different. ``[N]`` long.
        count: Places that there are.
        fill: What stands elsewhere.

    Returns:
        ``[count, ...]``.
    """
    found: Tensor = _Scatter.apply(rows, cells, count, fill)  # type: ignore[no-untyped-call]
    return found


def gathered_rows(rows: Tensor, cells: Tensor) -> Tensor:
    """Take rows from their places.

    Args:
        rows: ``[M, ...]``.
        cells: Those that are wanted, each once. ``[N]`` long.

    Returns:
        ``[N, ...]``.
    """
    found: Tensor = _Gather.apply(rows, cells)  # type: ignore[no-untyped-call]
    return found


class _Scatter(torch.autograd.Function):
    """Rows to their places; backward is a copy where autograd would add."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, cells: Tensor, count: int, fill: float) -> Tensor:
        ctx.save_for_backward(cells)
        return tokens.new_full((count, *tokens.shape[1:]), fill).index_copy_(0, cells, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cells,) = ctx.saved_tensors
        return grads[0].index_select(0, cells), None, None, None


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
