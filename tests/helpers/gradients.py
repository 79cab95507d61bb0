"""Gradients of networks on one small batch, and how far two of them are apart."""

from __future__ import annotations

import torch

from ppo_lightning.models import ActorCritic
from ppo_lightning.models.scoring import PolicyOutput
from tests.helpers.sequences import sequences_of

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8, 21], [3]], [[20, 13, 17, 2], [9, 22], [4, 5, 6]])

Gradients = dict[str, torch.Tensor]


def gradients_of(networks: ActorCritic) -> tuple[PolicyOutput, Gradients]:
    networks.zero_grad()
    output = networks(BATCH, temperature=0.8)
    per_token = output.logprobs + output.entropy + output.values.square()
    per_token[BATCH.response_mask].mean().backward()
    return output, {n: p.grad for n, p in networks.named_parameters() if p.grad is not None}


def distance(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference, over that of the second."""
    ours, theirs = (torch.cat([g[n].flatten() for n in expected]) for g in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())
