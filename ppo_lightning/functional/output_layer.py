"""Output layer, log-softmax and entropy in one, a few rows at a time.

A vocabulary of 50,000 makes the logits of a microbatch the largest tensor of a run by far. Here
they exist for a few rows only: the forward pass keeps two numbers a row, and the backward pass
makes the logits again, for one more product of the output layer, unless they are few. Peak memory
does not grow with N·V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_lightning.functional.autocast import autocast_off
from ppo_lightning.functional.masking import accumulation_dtype, product_dtype
from ppo_lightning.functional.products import (
    ROUND,
    add_product,
    linear,
    product,
    rounded_up,
    row_multiple,
)

CHUNK_BYTES = 8 * 2**20
"""Of the logits that exist at once on a CPU: a few caches' worth. 64 rows at least, since each
chunk reads the whole layer."""

ACCELERATOR_CHUNK_BYTES = 512 * 2**20
"""The same elsewhere, where only large products are quick."""

KEPT_BYTES = 16 * 2**20
"""Up to this size all of them are kept for the backward pass."""

_LEAST_LOG = -1e4  # such a probability is 0 in float64 as well


class LinearLogprobs(NamedTuple):
    """What an output layer says of given tokens, in nats.

    Attributes:
        logprobs: Of each token at the temperature. ``[N]`` float32 (float64 for float64 states).
        entropy: Of the whole next-token distribution. ``[N]``; None where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    *,
    temperature: float,
    entropy: bool = False,
    entropy_grad: bool = True,
    chunk_rows: int | None = None,
) -> LinearLogprobs:
    """Score tokens from the states that predict them, as ``logprobs_and_entropy`` of the logits.

    Products are in autocast's dtype where that is on, everything after them in float32.

    Args:
        hidden: States before the output layer. ``[N, H]`` float.
        weight: Of the output layer. ``[V, H]``.
        bias: Of the output layer. ``[V]`` or None.
        ids: Tokens to score. ``[N]`` long.
        temperature: Sampling temperature, above 0.
        entropy: Whether to compute the entropy too.
        entropy_grad: False where the entropy is only logged.
        chunk_rows: Rows whose logits exist at once; None takes what is quick on the device.
    """
    device = hidden.device.type
    size = CHUNK_BYTES if device == "cpu" else ACCELERATOR_CHUNK_BYTES
    rows = chunk_rows or max(64, size // (4 * weight.shape[0]) // ROUND * ROUND)
    dtype, wanted = product_dtype(hidden), (entropy, entropy and entropy_grad)
    count = len(ids)
    if missing := rounded_up(count, row_multiple(weight)) - count:
        hidden, ids = pad(hidden, (0, 0, 0, missing)), pad(ids, (0, missing))
    logprobs, spread = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, ids, 1.0 / temperature, dtype, rows, *wanted
    )
    return LinearLogprobs(logprobs[:count], spread[:count] if entropy else None)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        sharpness: float,
        dtype: torch.dtype,
        rows: int,
        entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        exact = accumulation_dtype(hidden)
        logprobs = hidden.new_zeros(len(ids), dtype=exact)
        log_sums, spread = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        keeps = any(ctx.needs_input_grad) and _bytes(ids, weight, exact) <= KEPT_BYTES
        kept = []
        with autocast_off(hidden.device.type):
            layer = _Layer(weight, bias, dtype, sharpness, exact)
            for part in _parts(len(ids), rows):
                logits = layer.logits(hidden[part])
                log_sum = logits.logsumexp(-1)
                log_sums[part] = log_sum
                logprobs[part] = logits.gather(1, ids[part, None])[:, 0] - log_sum
                if entropy or keeps:
                    logits -= log_sum[:, None]
                if entropy:
                    spread[part] = _entropy(logits.exp(), logits)
                if keeps:
                    kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, ids, log_sums, spread, *kept)
        ctx.settings = sharpness, dtype, rows, exact, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, log_sums, spread, *kept = ctx.saved_tensors
        sharpness, dtype, rows, exact, entropy_grad = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        layer = _Layer(weight, bias, dtype, sharpness, exact)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight) if needs_weight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        for number, part in enumerate(_parts(len(ids), rows)):
            if kept:
                logs = kept[number].clone()
            else:
                logs = layer.logits(hidden[part]).sub_(log_sums[part, None])
            of_entropy = grads[1][part] if entropy_grad else None
            slope = _slope(logs, ids[part], grads[0][part], of_entropy, spread[part])
            slope *= sharpness
            if of_bias is not None:
                of_bias += slope.sum(0)
            slope = slope.to(dtype)
            if of_hidden is not None:
                of_hidden[part] = product(slope, layer.weight)
            if of_weight is not None:
                add_product(of_weight, slope.t(), hidden[part].to(dtype))
        return of_hidden, of_weight, of_bias, *[None] * 6


class _Layer:
    """The output layer in the dtype of the products."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        sharpness: float,
        exact: torch.dtype,
    ) -> None:
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.dtype, self.sharpness, self.exact = dtype, sharpness, exact

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the temperature, a new tensor. ``[N, V]`` float32 or float64."""
        found = linear(hidden.to(self.dtype), self.weight, self.bias).to(self.exact)
        return found if self.sharpness == 1.0 else found.mul_(self.sharpness)


def _slope(
    logs: Tensor, ids: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None, spread: Tensor
) -> Tensor:
    """Gradient at the logits over the temperature, from those at the results. ``[N, V]``.

    Args:
        logs: Log-probabilities of all tokens; used up. ``[N, V]``.
        ids: ``[N]``.
        of_logprobs: ``[N]``.
        of_entropy: ``[N]``, or None.
        spread: Entropy. ``[N]``.
    """
    if of_entropy is None:
        slope = logs.exp_().mul_(-of_logprobs[:, None])
    else:
        probs = logs.exp()
        # d entropy / d logit = -p (log p + entropy), and p log p is 0 at a barred token.
        inner = _finite(logs).add_(spread[:, None]).mul_(of_entropy[:, None])
        slope = inner.add_(of_logprobs[:, None]).mul_(probs).neg_()
    return slope.scatter_add_(1, ids[:, None], of_logprobs[:, None])


def _entropy(probs: Tensor, logs: Tensor) -> Tensor:
    return -probs.mul_(_finite(logs)).sum(-1)


def _finite(logs: Tensor) -> Tensor:
    """Bound the logarithm of a barred token in place: its probability of 0 would make nan of it."""
    return logs.clamp_min_(_LEAST_LOG)


def _bytes(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> int:
    """Size of all logits."""
    return len(ids) * weight.shape[0] * dtype.itemsize


def _parts(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, count, rows))
