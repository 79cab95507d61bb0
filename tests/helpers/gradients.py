"""Gradients of networks on a small batch, and how far two of them are apart."""

from __future__ import annotations

import torch

from ppo_lightning.models import ActorCritic
from ppo_lightning.models.scoring import PolicyOutput
from ppo_lightning.types import Sequences
from tests.helpers.sequences import sequences_of

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8, 21], [3]], [[20, 13, 17, 2], [9, 22], [4, 5, 6]])

Gradients = dict[str, torch.Tensor]


def gradients_of(networks: ActorCritic, batch: Sequences = BATCH) -> tuple[PolicyOutput, Gradients]:
    networks.zero_grad()
    output = networks(batch, temperature=0.8)
    per_token = output.logprobs + output.entropy + output.values.square()
    (per_token[batch.response_mask].mean() + output.final_values.mean()).backward()
    return output, {n: p.grad for n, p in networks.named_parameters() if p.grad is not None}


def distance(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference, over that of the second."""
    ours, theirs = (torch.cat([g[n].flatten() for n in expected]) for g in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())
