"""The loss of one microbatch, and the sums that are logged about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.functional import (
    aggregate,
    full_kl,
    kl_estimate,
    kl_loss_per_token,
    penalty_loss_per_token,
    policy_loss_per_token,
    value_loss_per_token,
)
from ppo_lightning.models import PolicyOutput
from ppo_lightning.types import Experience

LOG_RATIO_CLAMP = 10.0

SUMS = (
    "policy_loss",
    "value_loss",
    "entropy",
    "kl_old",
    "kl_loss",
    "ratio",
    "outside",
    "clip_active",
    "dual_clipped",
    "value_clipped",
    "ratio_clamped",
    "tokens",
)
"""Names of the entries of ``Terms.sums``."""


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What may change between iterations; the rest of the objective is in the configs.

    Args:
        clip_low: ε below 1.
        clip_high: ε above 1.
        ent_coef: Weight of the entropy bonus.
        kl_coef: β, used here where the KL is part of the loss.
        penalty_coef: Coefficient of KL(old‖new) in PPO-Penalty.
    """

    clip_low: float
    clip_high: float
    ent_coef: float
    kl_coef: float
    penalty_coef: float


class Counts(NamedTuple):
    """Divisors of the losses: of the whole minibatch on all ranks, over the number of ranks."""

    num_tokens: float
    num_sequences: float


class Terms(NamedTuple):
    """Loss of one microbatch and what is logged about it.

    Attributes:
        loss: Its contribution to the loss of the step; a scalar with gradient.
        sums: Sums over valid tokens, in the order of ``SUMS``. ``[len(SUMS)]`` float.
        ratio_max: Largest ratio. 0-d.
        first_error: Largest |log π_θ − log π_old|. 0-d.
    """

    loss: Tensor
    sums: Tensor
    ratio_max: Tensor
    first_error: Tensor


def microbatch_terms(
    output: PolicyOutput,
    batch: Experience,
    *,
    ppo: PPOConfig,
    kl: KLConfig,
    coefficients: Coefficients,
    counts: Counts,
    ref_logits: Tensor | None = None,
    temperature: float = 1.0,
) -> Terms:
    """Compute L = L_policy − ent_coef·S + vf_coef·L_value (+ β·KL where it is part of the loss).

    Args:
        output: Networks on the microbatch, with gradient. ``[B, R]`` each.
        batch: The microbatch.
        ppo: The objective.
        kl: Where the penalty towards the reference goes.
        coefficients: In force now.
        counts: Divisors.
        ref_logits: Of the reference, for ``kl.placement: loss`` with the ``full`` estimator.
            ``[B, R, V]``.
        temperature: Of the sampling distribution, for the same.
    """
    mask = batch.sequences.response_mask
    assert output.entropy is not None
    assert output.values is not None
    policy, ratio, flags = _policy_terms(output, batch, ppo, coefficients)
    value = value_loss_per_token(
        output.values,
        batch.old_values,
        batch.returns,
        mask,
        clip_range=ppo.value_clip_range,
        huber_delta=ppo.value_huber_delta,
    )
    kl_loss = torch.zeros_like(policy)
    if kl.placement == "loss":
        kl_loss = _kl_loss(output, batch, ref_logits, temperature)
    per_token = policy + ppo.vf_coef * value.loss
    if coefficients.ent_coef:
        per_token = per_token - coefficients.ent_coef * output.entropy
    if kl.placement == "loss":
        per_token = per_token + coefficients.kl_coef * kl_loss
    loss = aggregate(per_token, mask, mode=ppo.loss_aggregation, **counts._asdict())
    difference = (output.logprobs.detach() - batch.old_logprobs).masked_fill(~mask, 0)
    sums = _sums(
        mask,
        (policy, value.loss, output.entropy, _kl_old(difference), kl_loss, ratio),
        (*flags, value.clipped, difference.abs() > LOG_RATIO_CLAMP),
    )
    return Terms(loss, sums, ratio.max(), difference.abs().max())


@torch.no_grad()
def _sums(mask: Tensor, values: tuple[Tensor, ...], flags: tuple[Tensor, ...]) -> Tensor:
    """Sums over valid tokens in the order of ``SUMS``, in one reduction. ``[len(SUMS)]``."""
    table = torch.stack([row.to(values[0].dtype) for row in (*values, *flags, mask)])
    return table.masked_fill(~mask, 0).sum((1, 2))


def _kl_old(difference: Tensor) -> Tensor:
    """Estimate KL(old‖new) per token, from log π_θ − log π_old."""
    old = torch.zeros_like(difference)
    return kl_estimate(old, difference, estimator="k3", log_ratio_clamp=LOG_RATIO_CLAMP)


def _policy_terms(
    output: PolicyOutput, batch: Experience, ppo: PPOConfig, coefficients: Coefficients
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Loss per token, ratio, and the flags (outside, clip active, dual clipped)."""
    mask = batch.sequences.response_mask
    shared = (output.logprobs, batch.old_logprobs, batch.advantages, mask)
    if ppo.objective == "penalty":
        terms = penalty_loss_per_token(*shared, penalty_coef=coefficients.penalty_coef)
        low, high = 1 - coefficients.clip_low, 1 + coefficients.clip_high
        outside = ((terms.ratio < low) | (terms.ratio > high)) & mask
        unused = torch.zeros_like(outside)
        return terms.loss, terms.ratio, (outside, unused, unused)
    clipped = policy_loss_per_token(
        *shared,
        clip_low=coefficients.clip_low,
        clip_high=coefficients.clip_high,
        dual_clip=ppo.dual_clip,
        log_ratio_clamp=LOG_RATIO_CLAMP,
    )
    flags = (clipped.outside, clipped.clip_active, clipped.dual_clipped)
    return clipped.loss, clipped.ratio, flags


def _kl_loss(
    output: PolicyOutput, batch: Experience, ref_logits: Tensor | None, temperature: float
) -> Tensor:
    """KL(π_θ‖π_ref) per token as part of the loss. ``[B, R]``."""
    mask = batch.sequences.response_mask
    if ref_logits is None:
        return kl_loss_per_token(output.logprobs, batch.ref_logprobs, batch.old_logprobs, mask)
    assert output.logits is not None
    return full_kl(output.logits, ref_logits, temperature=temperature).masked_fill(~mask, 0)
