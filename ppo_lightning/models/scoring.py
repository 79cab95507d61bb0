"""One way to ask a causal model about tokens: for the actor, the reference and the critic alike.

Position ids come from the attention mask, logits are made at the response only, no model is ever
asked about the contents of padding, and log-probabilities are float32 at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_lightning.distributed import is_sharded
from ppo_lightning.functional import (
    LinearLogprobs,
    linear_logprobs,
    logprobs_and_entropy,
    row_multiple,
    token_logprobs,
    upcast,
)
from ppo_lightning.models.adapters import base_causal_lm
from ppo_lightning.models.frozen_trunk import begun_with, frozen_trunk_of
from ppo_lightning.models.fused import family_of
from ppo_lightning.models.inputs import Forward, call_model, replaced_forward
from ppo_lightning.models.last_block import narrowed
from ppo_lightning.models.layout import TokenLayout
from ppo_lightning.models.reading import reading_of
from ppo_lightning.types import Sequences


class PolicyOutput(NamedTuple):
    """What the networks say of response tokens. Everything is 0 outside ``response_mask``.

    Attributes:
        logprobs: Log-probability of each token at the sampling temperature, in nats. ``[B, R]``
            float32 (float64 for a float64 model); nan throughout where the policy was not asked.
        entropy: Of the whole next-token distribution at the same temperature, in nats. ``[B, R]``.
        values: V of the state *before* each token. ``[B, R]`` float32 or float64.
        logits: Before the temperature, not masked. ``[B, R, V]`` float32 or float64.
        final_values: V of the state after the last valid token, 0 in a row without any. ``[B]``.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None
    logits: Tensor | None = None
    final_values: Tensor | None = None


class Asked(NamedTuple):
    """What is wanted of the output layer.

    Attributes:
        temperature: Of the sampling distribution, above 0.
        entropy: Whether to compute the entropy too.
        entropy_grad: False where the entropy is only logged; saves memory.
        logits: Whether to return the logits too.
    """

    temperature: float
    entropy: bool = False
    entropy_grad: bool = True
    logits: bool = False


def response_scores(
    model: nn.Module, layout: TokenLayout, asked: Asked
) -> tuple[PolicyOutput, Tensor]:
    """Score the response tokens of a batch with a causal language model.

    Args:
        model: Of transformers, its adapters acting.
        layout: The batch.
        asked: What is wanted.

    Returns:
        The output without values, and the states that the layout asks about. ``[N + M, H]``.
    """
    count, found = len(layout.places), []
    head: Any = model.get_output_embeddings()  # type: ignore[operator]

    def fused(_: Forward, states: Tensor) -> Tensor:
        scores = linear_logprobs(
            states[:count],
            head.weight,
            head.bias,
            layout.targets,
            temperature=asked.temperature,
            entropy=asked.entropy,
            entropy_grad=asked.entropy_grad,
        )
        found.append(scores)
        return scores.logprobs[None, :, None]

    # An adapter on the output layer makes another layer of it, and a wrapper another function.
    plain = family_of(head) is nn.Linear and "forward" not in vars(head)
    if plain and reading_of(model).fused_head and not asked.logits:
        door, states = states_at_door(model, layout, fused)
        (scores,) = found
        if is_sharded(model):
            scores = scores._replace(logprobs=_by_way_of(door, scores.logprobs))
        return _written(layout, scores), states
    logits, states = states_at_door(model, layout, lambda own, at: own(at[None, :count]))
    rows = upcast(logits[0]) if asked.logits else logits[0]
    output = _written(layout, _scored(rows, layout.targets, asked))
    return (output._replace(logits=layout.on_tokens(rows)) if asked.logits else output), states


class _ByWayOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, door: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(door)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (door,) = ctx.saved_tensors
        return torch.zeros_like(door), grads[0]


def _by_way_of(door: Tensor, values: Tensor) -> Tensor:
    """Let the backward pass enter a model by its output, where weights in shards wait for it.

    Args:
        door: What the model returned; it gets a gradient of 0.
        values: What it made of its output layer; returned as they are.
    """
    joined: Tensor = _ByWayOf.apply(door, values)  # type: ignore[no-untyped-call]
    return joined


def states_at_door(
    model: nn.Module, layout: TokenLayout, instead: Callable[[Forward, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Call a model whose output layer sees only the states that are asked about.

    They are caught at the door of that layer rather than taken from the trunk, since some families
    scale or project them on the way there. What the frozen blocks make of the batch, if the layout
    knows it, is not computed again.

    Args:
        model: Causal language model of transformers.
        layout: The batch.
        instead: Takes the place of the layer: gets its ``forward`` and the states, ``[N + M, H]``,
            and returns what the model then takes for logits.

    Returns:
        What the model made of the result, and the states.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    caught: list[Tensor] = []

    def at_door(plain: Forward, hidden: Tensor) -> Tensor:
        caught.append(hidden.flatten(0, 1)[layout.asked])
        return instead(plain, caught[-1])

    known = nullcontext() if layout.trunk is None else begun_with(model, layout.trunk)
    with replaced_forward(head, at_door), known, narrowed(model, layout.rows):
        logits: Tensor = call_model(model, layout.inputs).logits
    return logits, caught[-1]


def trunk_states(model: nn.Module, layout: TokenLayout) -> Tensor:
    """Return the states that a layout asks about, and spare the output layer. ``[N + M, H]``."""
    return states_at_door(model, layout, lambda _, states: states[None, :1])[1]


def _scored(logits: Tensor, targets: Tensor, asked: Asked) -> LinearLogprobs:
    """Score tokens from logits that a model has made. ``[N, V]``."""
    if not asked.entropy:
        found = token_logprobs(logits, targets, temperature=asked.temperature)
        return LinearLogprobs(found, None)
    both = logprobs_and_entropy(
        logits, targets, temperature=asked.temperature, entropy_grad=asked.entropy_grad
    )
    return LinearLogprobs(*both)


def _written(layout: TokenLayout, scores: LinearLogprobs) -> PolicyOutput:
    return PolicyOutput(
        logprobs=layout.on_tokens(scores.logprobs),
        entropy=None if scores.entropy is None else layout.on_tokens(scores.entropy),
    )


def policy_logprobs(
    model: nn.Module,
    sequences: Sequences,
    *,
    temperature: float,
    entropy: bool = False,
    logits: bool = False,
) -> PolicyOutput:
    """Score response tokens with a causal language model, with or without an adapter.

    Args:
        model: Of transformers or PEFT.
        sequences: Prompts and responses.
        temperature: Of the sampling distribution, above 0.
        entropy: Whether to compute the entropy too.
        logits: Whether to return the logits too.

    Returns:
        Without values.
    """
    base = base_causal_lm(model)
    layout = layout_for(base, sequences)
    asked = Asked(temperature, entropy=entropy, logits=logits)
    return response_scores(base, layout, asked)[0]


def layout_for(model: nn.Module, sequences: Sequences, *, final: bool = False) -> TokenLayout:
    """Lay sequences out as a model reads them: without padding where it can.

    States that they bring along are the policy's, and those of its copies on the same base.
    """
    packed = reading_of(model).takes_packed(sequences.width)
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return TokenLayout.of(
        sequences,
        packed=packed,
        final=final,
        multiple=row_multiple(weight),
        trunk=sequences.trunk if frozen_trunk_of(model) else None,
    )


def unknown_logprobs(sequences: Sequences, like: Tensor) -> Tensor:
    """Stand in for log-probabilities that were not asked for: nan, so that use shows."""
    return torch.full_like(sequences.response_mask, torch.nan, dtype=like.dtype)
