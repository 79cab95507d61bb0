"""Rows of examples, packed or padded: what a causal model says of the learned tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.functional import token_logprobs
from ppo_lightning.models.adapters import base_causal_lm
from ppo_lightning.models.attention import ATTENTION
from ppo_lightning.models.checks import can_be_tried
from ppo_lightning.models.inputs import ModelInputs, call_model, replaced_forward
from ppo_lightning.models.reading import attention_window


class LearnedScores(NamedTuple):
    """What a model says of the learned tokens of some rows, one after the other.

    Attributes:
        logprobs: Log-probability of each, in nats. ``[N]`` float32 (float64 for such a model).
        correct: Whether it is the likeliest. ``[N]`` bool.
    """

    logprobs: Tensor
    correct: Tensor


def learned_scores(
    model: nn.Module,
    *,
    ids: Tensor,
    learned: Tensor,
    segments: Tensor,
    positions: Tensor,
    packed: bool,
) -> LearnedScores:
    """Score the learned tokens; logits are made at these only.

    Args:
        model: Causal language model of transformers or PEFT.
        ids: Whatever stands outside the segments is not read. ``[B, S]`` long.
        learned: Tokens to score; the first column is none of them. ``[B, S]`` bool.
        segments: Number of the example within its row, 0 where there is no token. ``[B, S]`` long.
        positions: Place within the example. ``[B, S]`` long.
        packed: Whether a row may hold several examples, which must not see each other.
    """
    base: Any = base_causal_lm(model)
    real = segments > 0
    mask = _block_mask(segments, base) if packed else real.long()
    inputs = ModelInputs(ids.masked_fill(~real, 0), mask, positions)
    before = torch.cat([learned[:, 1:], torch.zeros_like(learned[:, :1])], dim=1)
    # The output layer sees these places only.
    head = base.get_output_embeddings()
    with replaced_forward(head, lambda plain, hidden: plain(hidden[before][None])):
        scores = call_model(base, inputs).logits[0]  # [N, V]
    targets = ids[learned]
    return LearnedScores(
        logprobs=token_logprobs(scores, targets, temperature=1.0),
        correct=scores.detach().argmax(-1) == targets,
    )


def _block_mask(segments: Tensor, model: Any) -> Tensor:
    """Let a token see the earlier tokens of its own example. ``[B, 1, S, S]``.

    Padding sees padding, since a token that sees nothing would be nan.
    """
    width = segments.shape[1]
    same = segments[:, None, :, None] == segments[:, None, None, :]
    seen = same & torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    if model.config._attn_implementation in ("sdpa", ATTENTION):
        return seen
    # Others add the mask to their scores.
    hidden = torch.finfo(model.dtype).min
    return torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, hidden)


@torch.no_grad()
def check_packing(model: nn.Module, *, longest: int = 0) -> None:
    """Try on a few tokens that examples in one row do not see each other.

    Args:
        model: Just loaded; one that is not on the CPU is not tried.
        longest: Tokens of the longest example.

    Raises:
        ModelError: They do, or the model's attention takes no such mask, or looks no farther back
            than so many tokens: the mask of packed rows takes the place of that limit.
    """
    base: Any = base_causal_lm(model)
    kind = base.config._attn_implementation
    if kind not in ("sdpa", "eager", ATTENTION):
        raise ModelError(
            f"`packing: true` needs `policy.attn_implementation: sdpa` (or `eager`), got {kind}."
        )
    window = attention_window(base.config)
    if window is not None and longest > window:
        raise ModelError(
            f"`packing: true`: {type(base).__name__} looks back {window} tokens at most, which "
            f"packed rows would not heed, and the longest demonstration has {longest}. Leave "
            f"`packing` off, or set `data.init_args.max_tokens: {window}`."
        )
    if not can_be_tried(base):
        return
    was_training = base.training
    base.eval()
    try:
        apart = _trial(base, [[1, 2, 3, 2]], [[1, 1, 1, 1]])
        together = _trial(base, [[2, 3, 1, 1, 2, 3, 2]], [[1, 1, 1, 2, 2, 2, 2]])[-3:]
    finally:
        base.train(was_training)
    if not torch.allclose(apart, together, rtol=1e-3, atol=1e-3 * float(apart.abs().max())):
        raise ModelError(
            f"`packing: true`: in {type(base).__name__} examples in one row would see each other. "
            "Leave `packing` off for this model."
        )


def _trial(model: Any, ids: list[list[int]], segments: list[list[int]]) -> Tensor:
    """Log-probabilities of the tokens after the first of each segment."""
    rows, parts = torch.tensor(ids), torch.tensor(segments)
    starts = torch.ones_like(parts, dtype=torch.bool)
    starts[:, 1:] = parts[:, 1:] != parts[:, :-1]
    place = torch.arange(rows.shape[1])
    first = torch.where(starts, place, 0).cummax(1).values
    found = learned_scores(
        model,
        ids=rows % int(model.get_input_embeddings().weight.shape[0]),
        learned=~starts,
        segments=parts,
        positions=place - first,
        packed=True,
    )
    return found.logprobs
