"""One way to ask a causal model about tokens: for the actor, the reference and the critic alike.

Position ids come from the attention mask, logits are made at the response only, no model is ever
asked about the contents of padding, and log-probabilities are float32 at the sampling temperature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_lightning.functional import (
    last_index,
    logprobs_and_entropy,
    position_ids,
    token_logprobs,
    upcast,
)
from ppo_lightning.models.adapters import base_causal_lm
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


class ModelInputs(NamedTuple):
    """Arguments of one forward pass, each ``[B, S]`` long."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor

    def without_last_column(self) -> ModelInputs:
        """Return ``[B, S - 1]``."""
        return ModelInputs(*(part[:, :-1] for part in self))


def model_inputs(sequences: Sequences, *, final: bool) -> ModelInputs:
    """Lay prompt and response out for a forward pass.

    The ids under padding are replaced, so that any number may stand there. Without ``final`` the
    last column is left out: nothing comes after it that it could predict.

    Args:
        sequences: Prompts and responses.
        final: Whether the state after the last token is wanted too.

    Returns:
        ``S`` is ``P + R`` with ``final`` and ``P + R - 1`` without.
    """
    ids, mask = sequences.input_ids, sequences.attention_mask
    inputs = ModelInputs(ids.masked_fill(~mask, 0), mask.long(), position_ids(mask))
    return inputs if final else inputs.without_last_column()


def forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    """Name the arguments of a model's forward pass."""
    return _parameters(model_class.forward)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Look a signature up once: it takes as long as a tiny model's layer."""
    return frozenset(inspect.signature(function).parameters)


def call_model(model: nn.Module, inputs: ModelInputs, **options: Any) -> Any:
    """Run a transformers model without a cache, with the options that its family knows.

    Families without ``position_ids`` (ALiBi, recurrent ones) read the attention mask instead.
    """
    known = forward_parameters(type(model))
    options = {"position_ids": inputs.position_ids, "use_cache": False, **options}
    return model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **{name: value for name, value in options.items() if name in known},
    )


def last_logits(model: nn.Module, inputs: ModelInputs, *, width: int) -> Tensor:
    """Logits at the last ``width`` columns only. ``[B, width, V]``."""
    logits: Tensor = call_model(model, inputs, logits_to_keep=width).logits
    return logits[:, -width:]


def last_logits_and_states(
    model: nn.Module, inputs: ModelInputs, *, width: int
) -> tuple[Tensor, Tensor]:
    """Logits, and what the output layer made them from, in one pass.

    The state is caught at the door of the output layer rather than taken from the trunk, since
    some families scale or project it on the way there.

    Returns:
        ``[B, width, V]`` and ``[B, width, H]``.
    """
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    with _caught_input(head) as caught:
        logits = last_logits(model, inputs, width=width)
    return logits, caught[-1][:, -width:]


@contextmanager
def _caught_input(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what a module is called with."""
    caught: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...]) -> None:
        caught.append(args[0])

    handle = module.register_forward_pre_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


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
    inputs = model_inputs(sequences, final=False)
    width = sequences.response_ids.shape[1]
    scores = last_logits(base_causal_lm(model), inputs, width=width)
    return score_tokens(scores, sequences, temperature=temperature, entropy=entropy, logits=logits)


def score_tokens(
    scores: Tensor,
    sequences: Sequences,
    *,
    temperature: float,
    entropy: bool,
    entropy_grad: bool = True,
    logits: bool = False,
) -> PolicyOutput:
    """Turn the logits that predict each response token into log-probabilities.

    Args:
        scores: Column t predicts response token t. ``[B, R, V]`` float of any precision.
        sequences: Gives the tokens and their mask.
        temperature: Of the sampling distribution, above 0.
        entropy: Whether to compute the entropy too.
        entropy_grad: False where the entropy is only logged; saves memory.
        logits: Whether to return the logits too.
    """
    mask = sequences.response_mask
    ids = sequences.response_ids.masked_fill(~mask, 0)
    if logits:
        scores = upcast(scores)
    spread: Tensor | None = None
    if entropy:
        logprobs, spread = logprobs_and_entropy(
            scores, ids, temperature=temperature, entropy_grad=entropy_grad
        )
        spread = spread.masked_fill(~mask, 0)
    else:
        logprobs = token_logprobs(scores, ids, temperature=temperature)
    return PolicyOutput(
        logprobs=logprobs.masked_fill(~mask, 0), entropy=spread, logits=scores if logits else None
    )


def after_last_token(values: Tensor, response_mask: Tensor) -> Tensor:
    """Pick the value of the state that each response ends in.

    Args:
        values: Column t is the state before response token t. ``[B, R + 1]``.
        response_mask: ``[B, R]`` bool.

    Returns:
        ``[B]``, 0 in a row without a valid token.
    """
    last = last_index(response_mask)
    return values.gather(1, (last + 1)[:, None])[:, 0].masked_fill(last < 0, 0)


def unknown_logprobs(sequences: Sequences, like: Tensor) -> Tensor:
    """Stand in for log-probabilities that were not asked for: nan, so that use shows."""
    return torch.full_like(sequences.response_mask, torch.nan, dtype=like.dtype)
