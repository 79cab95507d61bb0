"""KL divergences between two policies: per-token estimates, the exact sum, and a loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ppo_lightning.functional.logprobs import log_softmax

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: KLEstimator,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """Estimate KL(p || q) at tokens that were sampled from p.

    With x = log p - log q: ``k1`` = x, ``k2`` = x²/2, ``k3`` = exp(-x) - 1 + x, ``abs`` = |x|.
    A single ``k1`` may well be negative. These are values to put into a reward or a metric; their
    gradients are mostly not those of the KL (see ``kl_loss_per_token``).

    Args:
        logprobs: log p of the sampled tokens, p being what sampled them. ``[B, R]`` float.
        ref_logprobs: log q of the same tokens. ``[B, R]`` float.
        estimator: Which of the four.
        log_ratio_clamp: Bound on |x| before anything is computed from it; None for no bound.

    Returns:
        ``[B, R]``, in nats per token. Nothing is masked: select the valid tokens before summing.

    Raises:
        ValueError: ``estimator`` is none of the four.

    Source:
        Schulman 2020, "Approximating KL Divergence".
    """
    x = logprobs - ref_logprobs
    if log_ratio_clamp is not None:
        x = x.clamp(-log_ratio_clamp, log_ratio_clamp)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return torch.expm1(-x) + x
    if estimator == "abs":
        return x.abs()
    raise ValueError(f"`estimator` must be one of k1, k2, k3, abs, got {estimator!r}.")


def full_kl(logits: Tensor, ref_logits: Tensor, *, temperature: float) -> Tensor:
    """Compute KL(p || q) exactly, by the sum over the vocabulary.

    Args:
        logits: Of p. ``[..., V]`` float; ``-inf`` bars a token.
        ref_logits: Of q. ``[..., V]`` float. A token barred here only makes the KL huge or inf.
        temperature: Divides both sets of logits, above 0.

    Returns:
        ``[...]``, in nats per token, never negative.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    # Bounded logarithms: a token barred in p then counts 0, and not 0 * inf or inf - inf.
    logp = log_softmax(logits, temperature=temperature)
    floor = torch.finfo(logp.dtype).min
    logq = log_softmax(ref_logits, temperature=temperature).clamp_min(floor)
    return (logp.exp() * (logp.clamp_min(floor) - logq)).sum(-1).clamp_min(0)


def kl_loss_per_token(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: Literal["k2"] = "k2",
    log_weight_clamp: float = 10.0,
) -> Tensor:
    """Penalise KL(π ‖ π_ref) in the loss, with a gradient that is right in expectation.

    ``w · x²/2`` with x = log π - log π_ref and the importance weight w = π / π_old, held constant.
    Its gradient w · x · ∇log π averages over tokens from π_old to Σ π x ∇log π, which is the
    gradient of the exact KL. The value is the k2 estimate.

    Args:
        logprobs: Of the policy being trained, with gradient. ``[B, R]`` float.
        ref_logprobs: Of the frozen reference. ``[B, R]`` float.
        old_logprobs: Of the policy that sampled the tokens. ``[B, R]`` float.
        mask: Valid tokens; None when every token is. ``[B, R]`` bool.
        estimator: ``k2``. The others are refused.
        log_weight_clamp: Bound on |log w|.

    Returns:
        ``[B, R]``, 0 outside ``mask``.

    Raises:
        ValueError: ``estimator`` is not ``k2``.

    Source:
        Schulman 2020, "Approximating KL Divergence", for the value.
    """
    _refuse_wrong_gradients(estimator)
    log_ratio, log_weight = logprobs - ref_logprobs, (logprobs - old_logprobs).detach()
    if mask is not None:
        log_ratio = log_ratio.masked_fill(~mask, 0)
        log_weight = log_weight.masked_fill(~mask, 0)
    weight = log_weight.clamp(-log_weight_clamp, log_weight_clamp).exp()
    return weight * log_ratio.square() / 2


_WRONG_GRADIENT = {
    "k1": "the gradient of k1 is the score function, which is 0 in expectation: it adds noise only",
    "k3": "the gradient of k3 is that of KL(π_ref ‖ π), the other direction",
    "abs": "the gradient of abs follows the sign of the log ratio and is that of no KL",
}


def _refuse_wrong_gradients(estimator: str) -> None:
    if estimator == "k2":
        return
    reason = _WRONG_GRADIENT.get(estimator, "it is not known")
    raise ValueError(
        f"`estimator` {estimator!r} cannot be a KL loss: {reason}. Use 'k2' for KL in the loss, "
        "or put the KL into the reward, where any estimator will do."
    )
