"""From one score per response to one reward per token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ppo_lightning.functional.masking import last_index, masked_sum, upcast

KLPlacement = Literal["token", "last", "loss"]


def score_after_penalties(
    scores: Tensor, *, ended_with_eos: Tensor, missing_eos_penalty: float
) -> Tensor:
    """Take a fixed amount off the score of every response that was cut before its end token.

    Args:
        scores: ``[B]`` float.
        ended_with_eos: True where the response ended by itself. ``[B]`` bool.
        missing_eos_penalty: Amount to subtract, in score units, normally 0 or more.

    Returns:
        ``[B]``.
    """
    return torch.where(ended_with_eos, scores, scores - missing_eos_penalty)


def overlong_penalties(lengths: Tensor, *, start: int, end: int, penalty: float) -> Tensor:
    """Give the soft penalty of long responses, to be subtracted from their scores.

    Args:
        lengths: Tokens of each response. ``[B]`` long.
        start: No penalty up to this length.
        end: The whole penalty from this length on; in proportion between.
        penalty: In score units.

    Returns:
        ``[B]`` float32, from 0 to ``penalty``.

    Source:
        Yu et al. 2025, arXiv:2503.14476, eq. 13.
    """
    share = ((lengths - start) / (end - start)).clamp(0, 1)
    return penalty * share.float()


def clip_scores(scores: Tensor, low: float | None, high: float | None) -> Tensor:
    """Bound the scores; a nan stays nan, for the guard to find.

    Args:
        scores: ``[B]`` float.
        low: Smallest score, or None.
        high: Largest score, or None.

    Returns:
        ``[B]``.
    """
    if low is None and high is None:
        return scores
    return scores.clamp(low, high)


@torch.no_grad()
def token_rewards(
    scores: Tensor,
    kl: Tensor,
    response_mask: Tensor,
    *,
    kl_coef: float,
    placement: KLPlacement = "token",
    token_scores: Tensor | None = None,
) -> Tensor:
    """Lay out the rewards of a response: the KL penalty, and the score at the last valid token.

    The score adds to whatever the last token carries already. A row without valid tokens gets
    nothing.

    Args:
        scores: Shaped score of each response. ``[B]`` float.
        kl: Estimate of the KL to the reference at each token, in nats. ``[B, R]`` float.
        response_mask: Valid tokens; holes are allowed and get no KL. ``[B, R]`` bool.
        kl_coef: Reward units per nat, β.
        placement: ``token`` puts -β·KL at its token, ``last`` the sum of the row at the last valid
            token, ``loss`` leaves the KL to the loss.
        token_scores: Reward parts that already belong to tokens. ``[B, R]`` float, or None.

    Returns:
        ``[B, R]`` float32 or float64, without gradient, 0 outside the mask.

    Raises:
        ValueError: ``placement`` is none of the three.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2.
    """
    if placement not in ("token", "last", "loss"):
        raise ValueError(f"`placement` must be one of token, last, loss, got {placement!r}.")
    at_last = upcast(scores)
    rewards = torch.zeros_like(response_mask, dtype=at_last.dtype)
    # A coefficient of 0 means no KL at all, not 0 times an estimate that may have overflowed.
    if kl_coef != 0 and placement == "token":
        rewards = rewards - kl_coef * upcast(kl)
    if kl_coef != 0 and placement == "last":
        at_last = at_last - kl_coef * masked_sum(kl, response_mask, -1)
    if token_scores is not None:
        rewards = rewards + upcast(token_scores)
    rewards = rewards.masked_fill(~response_mask, 0)
    return rewards + at_last_token(at_last, response_mask)


def at_last_token(per_row: Tensor, mask: Tensor) -> Tensor:
    """Put one number per row at the row's last valid token and 0 everywhere else.

    Args:
        per_row: ``[B]`` float.
        mask: ``[B, R]`` bool.

    Returns:
        ``[B, R]``; a row without valid tokens is all 0, even if its number is nan.
    """
    places = torch.arange(mask.shape[-1], device=mask.device)
    is_last = places == last_index(mask).unsqueeze(-1)
    return torch.where(is_last, per_row.unsqueeze(-1), 0)


def spread_over(tokens: Tensor, mask: Tensor) -> Tensor:
    """Lay the numbers of each row's valid tokens out at those tokens.

    Args:
        tokens: A number for each valid token of a row, in their order, then padding. ``[B, T]``
            float; T is the most valid tokens in a row, or more.
        mask: Valid tokens; holes are allowed. ``[B, R]`` bool.

    Returns:
        ``[B, R]``, 0 outside the mask.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    found = tokens.new_zeros(mask.shape)
    # Both selections go row by row and from left to right.
    found[mask] = tokens[places < mask.sum(1, keepdim=True)]
    return found
