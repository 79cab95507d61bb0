"""Advantages and returns of responses, each of them one episode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_lightning.functional.masking import upcast
from ppo_lightning.functional.rewards import at_last_token


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns with GAE(λ).

    A response ends at its last valid token; the value after it is 0, or ``bootstrap_values``.
    Places outside the mask are never read and come back as 0. In a mask with holes (tokens of a
    tool or a user between the policy's own) the holes are no steps: the row is closed up, so γ and
    λ count the policy's own tokens.

    Args:
        rewards: Reward after each token, in score units. ``[B, R]`` float.
        values: V(s_t) at the state before token t. ``[B, R]`` float.
        response_mask: The policy's own tokens. ``[B, R]`` bool.
        gamma: Discount per token, in [0, 1].
        gae_lambda: 0 is one-step TD, 1 is Monte Carlo.
        bootstrap_values: V after the last valid token, 0 where the response ended by itself.
            ``[B]`` float, or None.

    Returns:
        ``(advantages, returns)``, both ``[B, R]`` float32 or float64, without gradient. The
        advantages are raw; the returns are raw advantages plus values.

    Raises:
        ValueError: The tensors differ in shape.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    _check_shapes(rewards, values, response_mask, bootstrap_values)
    outside = ~response_mask
    rewards = upcast(rewards).masked_fill(outside, 0)
    values = upcast(values).masked_fill(outside, 0)
    if bootstrap_values is not None:
        # γV after the end enters δ exactly like a reward at the last token.
        rewards = rewards + at_last_token(gamma * upcast(bootstrap_values), response_mask)
    slots = _slots(response_mask) if _has_holes(response_mask) else None
    packed_values = values if slots is None else _pack(values, slots)
    packed_rewards = rewards if slots is None else _pack(rewards, slots)
    next_values = F.pad(packed_values[:, 1:], (0, 1))
    deltas = torch.add(packed_rewards - packed_values, next_values, alpha=gamma)
    advantages = _discounted_sums(deltas, gamma * gae_lambda)
    if slots is not None:
        advantages = advantages.gather(1, slots).masked_fill(outside, 0)
    return advantages, advantages + values


def discounted_returns(
    rewards: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    """Add up the rewards from each token on: G_t = r_t + γ·G_{t+1}, without any critic.

    Args:
        rewards: Reward after each token. ``[B, R]`` float.
        response_mask: The policy's own tokens, holes allowed. ``[B, R]`` bool.
        gamma: Discount per token, in [0, 1].
        bootstrap_values: G after the last valid token. ``[B]`` float, or None for 0.

    Returns:
        ``[B, R]`` float32 or float64, 0 outside the mask.

    Raises:
        ValueError: The tensors differ in shape.
    """
    # With V = 0 and λ = 1 the advantages are these sums.
    return gae(
        rewards,
        torch.zeros_like(rewards),
        response_mask,
        gamma=gamma,
        gae_lambda=1.0,
        bootstrap_values=bootstrap_values,
    )[0]


def _check_shapes(
    rewards: Tensor, values: Tensor, mask: Tensor, bootstrap_values: Tensor | None
) -> None:
    if not rewards.shape == values.shape == mask.shape or mask.dim() != 2:
        raise ValueError(
            "`rewards`, `values` and `response_mask` must have one shape [B, R], got "
            f"{tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}."
        )
    if bootstrap_values is not None and bootstrap_values.shape != mask.shape[:1]:
        raise ValueError(
            f"`bootstrap_values` must have shape {tuple(mask.shape[:1])}, one per response, got "
            f"{tuple(bootstrap_values.shape)}."
        )


def _has_holes(mask: Tensor) -> bool:
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _slots(mask: Tensor) -> Tensor:
    """Give each valid token its place in the closed-up row; a hole shares its predecessor's."""
    return (mask.cumsum(1) - 1).clamp_min(0)


def _pack(x: Tensor, slots: Tensor) -> Tensor:
    # x is 0 in the holes, so that what they add to their neighbour's slot is nothing.
    return torch.zeros_like(x).scatter_add_(1, slots, x)


def _discounted_sums(x: Tensor, factor: float) -> Tensor:
    """Compute y_t = x_t + factor · y_{t+1} along the rows: one in-place addition per column."""
    columns = x.t().clone(memory_format=torch.contiguous_format)  # [R, B]
    rows = columns.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].add_(rows[t + 1], alpha=factor)
    return columns.t().contiguous()
