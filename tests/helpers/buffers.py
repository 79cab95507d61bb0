"""Rollouts, network scores and buffers of given or of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.models import PolicyOutput
from ppo_lightning.rollout import NetworkScores
from ppo_lightning.types import Experience, PromptRecord, Rollout, Sequences
from tests.helpers.scripted import prompt_batch
from tests.helpers.sequences import sequences_of

COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "values", "old_values")


def rollout_of(
    responses: Sequence[Sequence[int]],
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    truncated: Sequence[bool] | None = None,
    padding: int = 0,
) -> Rollout:
    """A rollout of given responses to prompts of one token, if none are given."""
    count = len(responses)
    batch = prompt_batch(prompts if prompts is not None else [[1]] * count)
    sequences = sequences_of([[1]] * count, responses, padding=padding)
    return Rollout(
        prompts=batch,
        response_ids=sequences.response_ids,
        response_mask=sequences.response_mask,
        sampler_logprobs=torch.zeros(sequences.response_ids.shape),
        truncated=torch.tensor(list(truncated) if truncated is not None else [False] * count),
        policy_version=7,
        temperature=1.0,
    )


def network_scores(rollout: Rollout, **columns: Any) -> NetworkScores:
    """What networks said: zeros where nothing is given; ``kl`` is k1 of the log-probs."""
    shape = rollout.response_ids.shape
    zeros = torch.zeros(shape)
    names = ("logprobs", "entropy", "values", "ref_logprobs")
    table: dict[str, Tensor] = {name: torch.as_tensor(columns.get(name, zeros)) for name in names}
    table["kl"] = torch.as_tensor(columns.get("kl", table["logprobs"] - table["ref_logprobs"]))
    table["final_values"] = torch.as_tensor(columns.get("final_values", torch.zeros(shape[0])))
    return NetworkScores(**table)


def random_minibatch(
    mask: Tensor, *, seed: int = 0, padding: float = float("nan"), spread: float = 0.5
) -> tuple[Experience, PolicyOutput]:
    """A minibatch and what the networks say of it, as leaves, with ``padding`` outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        values = scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        return values.masked_fill(~mask, padding)

    columns = {name: draw(spread) for name in COLUMNS}
    ids = torch.zeros(mask.shape, dtype=torch.long)
    experience = experience_of(
        Sequences(prompt_ids=ids, prompt_mask=ids == 0, response_ids=ids, response_mask=mask),
        old_logprobs=columns["old_logprobs"],
        old_values=columns["old_values"],
        ref_logprobs=columns["ref_logprobs"],
        advantages=draw(1.0),
        returns=draw(1.0),
    )
    output = PolicyOutput(
        logprobs=columns["logprobs"].requires_grad_(),
        entropy=columns["entropy"].requires_grad_(),
        values=columns["values"].requires_grad_(),
    )
    return experience, output


def experience_of(sequences: Sequences, **columns: Any) -> Experience:
    """A buffer of one rank; columns that are not given are zeros."""
    count = len(sequences)
    zeros = torch.zeros(sequences.response_ids.shape)
    names = ("old_logprobs", "old_values", "ref_logprobs", "advantages", "returns")
    return Experience(
        sequences=sequences,
        **{name: columns.get(name, zeros) for name in names},
        indices=torch.arange(count),
        num_responses=count,
        iteration=columns.get("iteration", 0),
        policy_version=0,
        temperature=columns.get("temperature", 1.0),
    )


def records(count: int) -> tuple[PromptRecord, ...]:
    """Prompts by number."""
    return tuple(PromptRecord(prompt=f"p{i}", text=f"p{i}") for i in range(count))
