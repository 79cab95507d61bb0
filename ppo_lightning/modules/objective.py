"""The loss of one microbatch, and the sums that are logged about it."""

from __future__ import annotations

from collections.abc import Mapping
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
from ppo_lightning.modules.passes import Part
from ppo_lightning.types import Experience

LOG_RATIO_CLAMP = 10.0

SUMS = (
    "policy_loss",
    "entropy",
    "kl_old",
    "kl_loss",
    "kl_ref",
    "kl_ref_before",
    "ratio",
    "outside",
    "positive",
    "outside_positive",
    "negative",
    "outside_negative",
    "ratio_beyond_2",
    "clip_active",
    "dual_clipped",
    "ratio_clamped",
    "log_ratio_abs",
    "tokens",
    "sequences",
    "value_loss",
    "value_clipped",
    "value_tokens",
    "ptx_loss",
    "ptx_tokens",
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
        sums: Sums over valid tokens, in the order of ``SUMS``; 0 for what was not trained.
            ``[len(SUMS)]`` float.
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
    part: Part = "both",
    ref_logits: Tensor | None = None,
) -> Terms:
    """Compute L = L_policy − ent_coef·S + vf_coef·L_value (+ β·KL where it is part of the loss).

    Args:
        output: Networks on the microbatch, with gradient. ``[B, R]`` each.
        batch: The microbatch.
        ppo: The objective.
        kl: Where the penalty towards the reference goes.
        coefficients: In force now.
        counts: Divisors.
        part: What is trained; the other terms are left out.
        ref_logits: Of the reference, for ``kl.placement: loss`` with the ``full`` estimator.
            ``[B, R, V]``.
    """
    mask = batch.sequences.response_mask
    per_token = torch.zeros_like(batch.returns)
    found: dict[str, Tensor] = {}
    ratio_max = first_error = torch.zeros((), device=mask.device)
    if part != "critic":
        kl_loss = None
        if kl.placement == "loss":
            kl_loss = _kl_loss(output, batch, ref_logits)
        actor, actor_sums = _actor_terms(output, batch, ppo, coefficients, kl_loss)
        per_token, found = per_token + actor, found | actor_sums
        ratio_max = actor_sums["ratio"].max()
        first_error = _log_ratio(output, batch).abs().max()
    if part != "actor":
        critic, critic_sums = _critic_terms(output, batch, ppo)
        per_token, found = per_token + ppo.vf_coef * critic, found | critic_sums
    loss = aggregate(per_token, mask, mode=ppo.loss_aggregation, **counts._asdict())
    return Terms(loss, _sums(mask, found), ratio_max, first_error)


@torch.no_grad()
def _sums(mask: Tensor, found: Mapping[str, Tensor]) -> Tensor:
    """Sums over valid tokens in the order of ``SUMS``, in one reduction. ``[len(SUMS)]``."""
    dtype = next(iter(found.values())).dtype
    table = torch.zeros((len(SUMS), *mask.shape), dtype=dtype, device=mask.device)
    for name, column in found.items():
        table[SUMS.index(name)] = column
    return table.masked_fill(~mask, 0).sum((1, 2))


def _critic_terms(
    output: PolicyOutput, batch: Experience, ppo: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Value loss per token, and what is summed about it. ``[B, R]`` each."""
    mask = batch.sequences.response_mask
    assert output.values is not None
    value = value_loss_per_token(
        output.values,
        batch.old_values,
        batch.returns,
        mask,
        clip_range=ppo.value_clip_range,
        huber_delta=ppo.value_huber_delta,
    )
    found = {"value_loss": value.loss, "value_clipped": value.clipped, "value_tokens": mask}
    return value.loss, found


def _actor_terms(
    output: PolicyOutput,
    batch: Experience,
    ppo: PPOConfig,
    coefficients: Coefficients,
    kl_loss: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the policy per token, and what is summed about it. ``[B, R]`` each."""
    mask = batch.sequences.response_mask
    assert output.entropy is not None
    loss, ratio, flags = _policy_terms(output, batch, ppo, coefficients)
    difference = _log_ratio(output, batch)
    positive, negative = batch.advantages > 0, batch.advantages < 0
    found = {
        "policy_loss": loss,
        "entropy": output.entropy,
        "kl_old": _kl_old(difference),
        "ratio": ratio,
        # Of tokens that the old policy wrote: the ratio weighs them as the new one would write.
        "kl_ref": ratio * (output.logprobs - batch.ref_logprobs),
        "kl_ref_before": batch.old_logprobs - batch.ref_logprobs,
        "positive": positive,
        "outside_positive": flags["outside"] & positive,
        "negative": negative,
        "outside_negative": flags["outside"] & negative,
        "ratio_beyond_2": (ratio > 2) | (ratio < 0.5),
        "ratio_clamped": difference.abs() > LOG_RATIO_CLAMP,
        "log_ratio_abs": difference.abs(),
        "tokens": mask,
        "sequences": mask & (mask.cumsum(1) == 1),
        **flags,
    }
    if coefficients.ent_coef:
        loss = loss - coefficients.ent_coef * output.entropy
    if kl_loss is not None:
        loss, found["kl_loss"] = loss + coefficients.kl_coef * kl_loss, kl_loss
    return loss, found


def _log_ratio(output: PolicyOutput, batch: Experience) -> Tensor:
    """Log π_θ − log π_old without gradient, 0 outside the mask. ``[B, R]``."""
    mask = batch.sequences.response_mask
    return (output.logprobs.detach() - batch.old_logprobs).masked_fill(~mask, 0)


def _kl_old(difference: Tensor) -> Tensor:
    """Estimate KL(old‖new) per token, from log π_θ − log π_old."""
    old = torch.zeros_like(difference)
    return kl_estimate(old, difference, estimator="k3", log_ratio_clamp=LOG_RATIO_CLAMP)


def _policy_terms(
    output: PolicyOutput, batch: Experience, ppo: PPOConfig, coefficients: Coefficients
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss per token, ratio, and the flags by their names in ``SUMS``. ``[B, R]`` each."""
    loss, ratio, flags = _unweighted_policy_terms(output, batch, ppo, coefficients)
    if batch.importance_weights is not None:
        loss = loss * batch.importance_weights.masked_fill(~batch.sequences.response_mask, 0)
    return loss, ratio, flags


def _unweighted_policy_terms(
    output: PolicyOutput, batch: Experience, ppo: PPOConfig, coefficients: Coefficients
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Do what ``_policy_terms`` does, as if the policy itself had sampled."""
    mask = batch.sequences.response_mask
    shared = (output.logprobs, batch.old_logprobs, batch.advantages, mask)
    if ppo.objective == "penalty":
        terms = penalty_loss_per_token(*shared, penalty_coef=coefficients.penalty_coef)
        low, high = 1 - coefficients.clip_low, 1 + coefficients.clip_high
        outside = ((terms.ratio < low) | (terms.ratio > high)) & mask
        return terms.loss, terms.ratio.detach(), {"outside": outside}
    clipped = policy_loss_per_token(
        *shared,
        clip_low=coefficients.clip_low,
        clip_high=coefficients.clip_high,
        dual_clip=ppo.dual_clip,
        log_ratio_clamp=LOG_RATIO_CLAMP,
    )
    flags = {
        "outside": clipped.outside,
        "clip_active": clipped.clip_active,
        "dual_clipped": clipped.dual_clipped,
    }
    return clipped.loss, clipped.ratio.detach(), flags


def _kl_loss(output: PolicyOutput, batch: Experience, ref_logits: Tensor | None) -> Tensor:
    """KL(π_θ‖π_ref) per token as part of the loss. ``[B, R]``."""
    mask = batch.sequences.response_mask
    if ref_logits is None:
        return kl_loss_per_token(output.logprobs, batch.ref_logprobs, batch.old_logprobs, mask)
    assert output.logits is not None
    kl = full_kl(output.logits, ref_logits, temperature=batch.temperature)
    return kl.masked_fill(~mask, 0)
