"""Importance weights of tokens that were sampled by other weights, or in another arithmetic."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ppo_lightning.functional.masking import upcast


class ImportanceTerms(NamedTuple):
    """Weights of tokens and where the cap is in force, both ``[B, R]``."""

    weights: Tensor
    """π / μ, at most the cap; 0 outside the mask. Without gradient."""
    capped: Tensor
    """π / μ was above the cap. Bool."""


def truncated_importance_weights(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, cap: float
) -> ImportanceTerms:
    """Compute ``min(π / μ, cap)`` per token, π being the policy and μ what sampled.

    A sum over tokens that μ wrote, weighted so, stands for one over tokens that π writes; the cap
    takes a bias for a variance that is bounded. Where the two agree the weight is exactly 1.

    Args:
        logprobs: log π at buffer time (the proximal policy). ``[B, R]`` float.
        sampler_logprobs: log μ, of the same tokens at the same temperature. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        cap: Largest weight, at least 1.

    Returns:
        ``ImportanceTerms``; a nan inside the mask stays a nan.

    Source:
        Ionides 2008, "Truncated Importance Sampling"; behaviour and proximal policy kept apart:
        Hilton et al. 2022, arXiv:2110.00641, sec. 3.
    """
    padding = ~mask
    difference = upcast(logprobs.detach()) - upcast(sampler_logprobs.detach())
    ratio = difference.masked_fill(padding, 0).exp()
    capped = (ratio > cap) & mask
    return ImportanceTerms(ratio.clamp(max=cap).masked_fill(padding, 0), capped)
