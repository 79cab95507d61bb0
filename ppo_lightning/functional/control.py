"""Laws that adapt a coefficient between iterations."""

from __future__ import annotations

import math

_MAX_ERROR = 0.2


def adapted_kl_coef(
    kl_coef: float, kl: float, *, target: float, horizon: float, num_responses: int
) -> float:
    """Steer the KL coefficient in proportion to the relative error, bounded at ±20 %.

    ``β · (1 + clip(KL / target - 1, ±0.2) · n / horizon)``.

    Args:
        kl_coef: β of the iteration that was measured.
        kl: KL to the reference, in the unit of ``target``: nats per *response* as published, not
            per token. May be negative, being an estimate; a nan moves nothing.
        target: Wanted KL, above 0.
        horizon: Time constant, in responses, more than a fifth of ``num_responses``.
        num_responses: Responses since the last change, on all ranks.

    Returns:
        β of the next iteration.

    Raises:
        ValueError: ``target`` or ``horizon`` is not positive, or the horizon is so short that one
            step could take β to 0 or below.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2.
    """
    _require_positive("target", target)
    _require_positive("horizon", horizon)
    if horizon <= _MAX_ERROR * num_responses:
        raise ValueError(
            f"`horizon` must exceed {_MAX_ERROR} times the {num_responses} responses of an "
            f"iteration, got {horizon}: a single step could make the coefficient negative."
        )
    if math.isnan(kl):
        return kl_coef
    error = min(max(kl / target - 1, -_MAX_ERROR), _MAX_ERROR)
    return kl_coef * (1 + error * num_responses / horizon)


def adapted_penalty_coef(penalty_coef: float, kl: float, *, target: float) -> float:
    """Double the penalty of PPO-Penalty above 1.5 times the target KL, halve it below target / 1.5.

    Args:
        penalty_coef: β of the update that was measured.
        kl: KL(π_old ‖ π) after it, in nats per token. A nan moves nothing.
        target: Wanted KL, above 0.

    Returns:
        β of the next update; unchanged between the bounds and on them.

    Raises:
        ValueError: ``target`` is not positive.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, sec. 4.
    """
    _require_positive("target", target)
    if kl > 1.5 * target:
        return penalty_coef * 2
    if kl < target / 1.5:
        return penalty_coef / 2
    return penalty_coef


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, got {value}.")
