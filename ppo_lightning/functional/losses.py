"""Per-token losses of actor and critic, and the one reduction to a scalar.

All losses are to be minimised. Each selects the valid tokens before it computes, so whatever
stands at padding reaches neither the loss nor a gradient, and each returns 0 there. Nothing is
averaged before ``aggregate``, which divides by counts of the whole minibatch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_lightning.functional.kl import KLEstimator, kl_estimate
from ppo_lightning.functional.masking import masked_mean, masked_sum, upcast

LossAggregation = Literal["token", "sequence"]


class PolicyTerms(NamedTuple):
    """Clipped policy loss per token with what is worth logging about it, all ``[B, R]``."""

    loss: Tensor
    """With gradient; 0 outside the mask."""
    ratio: Tensor
    """π / π_old, detached; 0 outside the mask."""
    outside: Tensor
    """Ratio outside the band, whatever the advantage's sign. Bool."""
    clip_active: Tensor
    """The clipped term is strictly the larger: no gradient. Bool."""
    dual_clipped: Tensor
    """The bound of dual clipping is in force: no gradient. Bool."""


class PenaltyTerms(NamedTuple):
    """Penalised policy loss per token, all ``[B, R]`` and 0 outside the mask."""

    loss: Tensor
    """``surrogate + penalty_coef * kl``, with gradient."""
    surrogate: Tensor
    """``-ratio * advantage``, detached."""
    kl: Tensor
    """KL(π_old ‖ π), detached, in nats."""
    ratio: Tensor
    """π / π_old, detached."""


class ValueTerms(NamedTuple):
    """Value loss per token, ``[B, R]``."""

    loss: Tensor
    """With gradient, without the factor ½; 0 outside the mask."""
    clipped: Tensor
    """The clipped error is strictly the larger: no gradient. Bool."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, *, clamp: float | None = 10.0) -> Tensor:
    """Compute log π - log π_old, bounded; beyond the bound there is no gradient, a nan stays nan.

    Args:
        logprobs: Of the policy being trained. ``[B, R]`` float.
        old_logprobs: Of the policy that sampled. ``[B, R]`` float.
        clamp: Bound on the absolute value, so that ``exp`` stays finite; None for no bound.

    Returns:
        ``[B, R]``.
    """
    return _bounded(logprobs - old_logprobs, clamp)


def _bounded(x: Tensor, clamp: float | None) -> Tensor:
    return x if clamp is None else x.clamp(-clamp, clamp)


def _selected_ratio(
    logprobs: Tensor, old_logprobs: Tensor, padding: Tensor, clamp: float | None
) -> tuple[Tensor, Tensor]:
    """Return the unbounded log ratio, 0 at padding, and the ratio of the bounded one."""
    difference = (upcast(logprobs) - upcast(old_logprobs)).masked_fill(padding, 0)
    return difference, _bounded(difference, clamp).exp()


def policy_loss_per_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 10.0,
) -> PolicyTerms:
    """Compute PPO's clipped surrogate, ``max(-A·ρ, -A·clip(ρ, 1 - ε_low, 1 + ε_high))``.

    Args:
        logprobs: Of the policy being trained, with gradient. ``[B, R]`` float.
        old_logprobs: Of the policy that sampled. ``[B, R]`` float.
        advantages: Whitened. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        clip_low: ε below 1.
        clip_high: ε above 1.
        dual_clip: Bound c > 1 on the ratio's weight where the advantage is negative: the loss is at
            most ``-c·A``. None for none.
        log_ratio_clamp: Bound on the absolute log ratio, see ``log_ratio``.

    Returns:
        ``PolicyTerms``.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729,
        eq. 5.
    """
    padding = ~mask
    _, live_ratio = _selected_ratio(logprobs, old_logprobs, padding, log_ratio_clamp)
    minus_advantages = upcast(advantages).masked_fill(padding, 0).neg_()
    plain = minus_advantages * live_ratio
    with torch.no_grad():
        # Where the clipped term is strictly the larger the ratio lies outside the band and its
        # clamp has no gradient, so none of this needs a graph.
        ratio = live_ratio.detach()
        banded = ratio.clamp(1 - clip_low, 1 + clip_high)
        outside = banded != ratio
        clipped = minus_advantages * banded
        clip_active = clipped > plain
    loss = torch.where(clip_active, clipped, plain)
    dual_clipped = torch.zeros_like(clip_active)
    if dual_clip is not None:
        bound = dual_clip * minus_advantages
        dual_clipped = (minus_advantages > 0) & (loss.detach() > bound)
        loss = torch.where(dual_clipped, bound, loss)
    return PolicyTerms(loss, ratio.masked_fill(padding, 0), outside, clip_active, dual_clipped)


def penalty_loss_per_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    penalty_coef: float,
    estimator: KLEstimator | Literal["full"] = "k3",
    kl: Tensor | None = None,
    log_ratio_clamp: float | None = 10.0,
) -> PenaltyTerms:
    """Compute PPO's penalised surrogate, ``-ρ·A + β·KL(π_old ‖ π)``, without clipping.

    The tokens come from π_old, so here k1 and k3 have the gradient of the KL in expectation; that
    of k2 agrees with it near π_old only.

    Args:
        logprobs: Of the policy being trained, with gradient. ``[B, R]`` float.
        old_logprobs: Of the policy that sampled. ``[B, R]`` float.
        advantages: Whitened. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        penalty_coef: β, adapted between iterations.
        estimator: Of the KL from the log-probabilities, or ``full`` for the one given as ``kl``.
        kl: Exact KL(π_old ‖ π) per token, with gradient, from
            ``full_kl(old_logits, logits, ...)``; ``full`` only. ``[B, R]`` float.
        log_ratio_clamp: Bound on the absolute log ratio wherever it is exponentiated.

    Returns:
        ``PenaltyTerms``.

    Raises:
        ValueError: ``estimator`` is unknown, or ``full`` and ``kl`` do not come together.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, eq. 8.
    """
    if (estimator == "full") != (kl is not None):
        raise ValueError("`kl` must be given if and only if `estimator` is 'full'.")
    padding = ~mask
    difference, ratio = _selected_ratio(logprobs, old_logprobs, padding, log_ratio_clamp)
    surrogate = upcast(advantages).masked_fill(padding, 0).neg_() * ratio
    if estimator == "full":
        kl_old = upcast(cast(Tensor, kl)).masked_fill(padding, 0)
    else:
        kl_old = _kl_old_new(difference, estimator, log_ratio_clamp)
    loss = surrogate + penalty_coef * kl_old
    ratio = ratio.detach().masked_fill(padding, 0)
    return PenaltyTerms(loss, surrogate.detach(), kl_old.detach(), ratio)


def _kl_old_new(difference: Tensor, estimator: KLEstimator, clamp: float | None) -> Tensor:
    """Estimate KL(old ‖ new) from ``difference``, log new - log old."""
    # Only k3 exponentiates; bounding the others would drop the pull back where it is needed most.
    clamp = clamp if estimator == "k3" else None
    zeros = torch.zeros_like(difference)
    return kl_estimate(zeros, difference, estimator=estimator, log_ratio_clamp=clamp)


def value_loss_per_token(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_range: float | None,
    huber_delta: float | None = None,
) -> ValueTerms:
    """Compute the clipped squared error of the critic, without the factor ½.

    ``max((V - G)², (V_old + clip(V - V_old, ±ε) - G)²)``: a value that has left the trust region on
    the far side of its target gets no gradient.

    Args:
        values: Of the critic being trained, with gradient. ``[B, R]`` float.
        old_values: Of the critic at buffer time. ``[B, R]`` float.
        returns: Targets. ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        clip_range: ε, in score units; None for no clipping.
        huber_delta: Beyond this absolute error the loss grows linearly, ``2δ|e| - δ²``, which
            joins ``e²`` smoothly. None for the square everywhere.

    Returns:
        ``ValueTerms``.

    Source:
        Huang et al. 2023, "The N Implementation Details of RLHF with PPO", there with the ½.
    """
    padding = ~mask
    values = upcast(values).masked_fill(padding, 0)
    returns = upcast(returns).masked_fill(padding, 0)
    plain = _error_loss(values - returns, huber_delta)
    if clip_range is None:
        return ValueTerms(plain, torch.zeros_like(mask))
    with torch.no_grad():  # as in the policy loss: no gradient where the clipped error is in force
        old_values = upcast(old_values).masked_fill(padding, 0)
        # clamp to a band keeps V itself inside it; V_old + (V - V_old) would miss V by a rounding.
        banded = values.clamp(old_values - clip_range, old_values + clip_range)
        bounded = _error_loss(banded - returns, huber_delta)
        clipped = bounded > plain
    return ValueTerms(torch.where(clipped, bounded, plain), clipped)


def _error_loss(error: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return error.square()
    return 2 * F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)


def aggregate(
    loss_per_token: Tensor,
    mask: Tensor,
    *,
    mode: LossAggregation,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
) -> Tensor:
    """Reduce a microbatch to its contribution to the loss of the whole step.

    With the counts of the whole minibatch on all ranks, the contributions add up to the loss of the
    step however it is cut. Where the strategy averages gradients, divide the counts by the number
    of ranks first.

    Args:
        loss_per_token: ``[B, R]`` float.
        mask: Valid tokens. ``[B, R]`` bool.
        mode: ``token``: sum over tokens / ``num_tokens``. ``sequence``: sum of each row's mean over
            its own tokens / ``num_sequences``.
        num_tokens: Valid tokens of the step; None for those of ``mask``.
        num_sequences: Rows of the step with a valid token; None for those of ``mask``.

    Returns:
        A scalar, float32 or float64. Nothing valid gives 0, with a graph whose gradients are 0.

    Raises:
        ValueError: ``mode`` is neither of the two.
    """
    if mode == "token":
        total = masked_sum(loss_per_token, mask)
        count = mask.sum() if num_tokens is None else num_tokens
    elif mode == "sequence":
        total = masked_mean(loss_per_token, mask, dim=-1).sum()
        count = mask.any(-1).sum() if num_sequences is None else num_sequences
    else:
        raise ValueError(f"`mode` must be 'token' or 'sequence', got {mode!r}.")
    return total / (count + (count == 0))
