"""Laws that adapt a coefficient, the number of passes or the buffer between iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

_MAX_ERROR = 0.2

Payoff = Literal["unclear", "paid", "fading", "stalled"]
"""What growth of the KL has brought: see ``payoff_of_kl``."""


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
    error = _clip(kl / target - 1, -_MAX_ERROR, _MAX_ERROR)
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


def adapted_ent_coef(
    ent_coef: float, entropy: float, *, target: float, rate: float, low: float, high: float
) -> float:
    """Integrate the relative shortfall of the entropy into the weight of its bonus.

    ``clip(c + rate · clip(1 - H / target, ±1), low, high)``: projected dual ascent on the
    constraint H ≥ target, as the temperature of SAC, here once an iteration. The step is added,
    not multiplied (SAC's step on log α), so the weight leaves 0 and comes back to it; the
    projection keeps nothing in store, so it falls at once when the entropy has recovered; the
    error has no unit, so one ``rate`` serves vocabularies of every size.

    Args:
        ent_coef: Weight of the iteration that was measured.
        entropy: In the unit of ``target``. Where it is not finite nothing moves.
        target: Wanted least entropy, above 0.
        rate: Most that one step adds or takes, above 0.
        low: Least weight, where it rests while the entropy is above the target.
        high: Largest weight.

    Returns:
        Weight of the next iteration, in [low, high].

    Raises:
        ValueError: ``target`` or ``rate`` is not positive.

    Source:
        Haarnoja et al. 2018, arXiv:1812.05905, sec. 5, eq. 17-18.
    """
    _require_positive("target", target)
    _require_positive("rate", rate)
    if not math.isfinite(entropy):
        return ent_coef
    return _clip(ent_coef + rate * _clip(1 - entropy / target, -1, 1), low, high)


class Multiplier(NamedTuple):
    """A Lagrange multiplier between two iterations."""

    gathered: float
    """What violations have added up to: the dual variable."""
    value: float
    """λ in force, with what the last violation adds at once."""


def adapted_multiplier(
    multiplier: Multiplier, violation: float, *, rate: float, damping: float, largest: float
) -> Multiplier:
    """Move a Lagrange multiplier one step up its dual problem.

    ``g = clip(g + rate · violation, 0, largest)``: gradient ascent on the dual, projected. The
    projection keeps nothing in store: a multiplier that a long violation has driven to its largest
    value falls with the first iteration that is within the bound. Alone it swings, as it goes on
    rising until the policy is back at the bound; ``λ = clip(g + damping · violation, 0, largest)``
    leads it by a quarter of a swing (the integral and the proportional part of a controller).

    Args:
        multiplier: Of the iteration that was measured.
        violation: Mean cost less its bound (or the bound less the mean, where it is a lower one);
            above 0 where it is broken. Where it is not finite nothing moves.
        rate: Step for each unit of violation, above 0.
        damping: Lead for each unit of violation; 0 for none.
        largest: Bound of both.

    Returns:
        That of the next iteration, in [0, largest].

    Raises:
        ValueError: ``rate`` is not positive.

    Source:
        Tessler et al. 2018, arXiv:1805.11074, eq. 8; Stooke et al. 2020, arXiv:2007.03964, alg. 2.
    """
    _require_positive("rate", rate)
    if not math.isfinite(violation):
        return multiplier
    gathered = _clip(multiplier.gathered + rate * violation, 0.0, largest)
    return Multiplier(gathered, _clip(gathered + damping * violation, 0.0, largest))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of ``y`` over ``x``.

    Args:
        x: Where it was measured.
        y: What was measured there; as many.

    Returns:
        The slope; nan where ``x`` has no two different values.

    Raises:
        ValueError: The two differ in length.
    """
    if len(x) != len(y):
        raise ValueError(f"`x` and `y` must be of one length, got {len(x)} and {len(y)}.")
    if len(set(x)) < 2:
        return math.nan
    middle, level = math.fsum(x) / len(x), math.fsum(y) / len(y)
    moment = math.fsum((a - middle) * (b - level) for a, b in zip(x, y, strict=True))
    return moment / math.fsum((a - middle) ** 2 for a in x)


class WindowTrend(NamedTuple):
    """Where KL and reward went in a window of iterations, by straight lines through both."""

    kl_growth: float
    """Rise of the KL from the first to the last iteration."""
    gain: float
    """Rise of the reward."""
    reward_per_kl: float
    """Slope of reward over KL."""


def window_trend(kl: Sequence[float], rewards: Sequence[float]) -> WindowTrend:
    """Fit straight lines to a window of iterations.

    Args:
        kl: KL to the reference of each iteration, the earliest first.
        rewards: Mean reward of each.
    """
    times, last = range(len(kl)), len(kl) - 1
    return WindowTrend(
        kl_growth=last * slope(times, kl),
        gain=last * slope(times, rewards),
        reward_per_kl=slope(kl, rewards),
    )


def payoff_of_kl(
    trend: WindowTrend,
    *,
    best: float | None,
    spread: float,
    min_kl_growth: float,
    min_gain: float,
    slope_share: float,
) -> Payoff:
    """Say what the growth of the KL in a window has paid.

    A run that never earned anything and one that earns less and less both show reward that no
    longer follows the KL, and need the opposite: ``best`` tells them apart.

    Args:
        trend: Of the window.
        best: Largest reward per KL of the windows that paid; None if none did.
        spread: Standard deviation of the scores.
        min_kl_growth: Below it nothing can be said.
        min_gain: A gain counts above this share of ``spread``.
        slope_share: Reward per KL fades below this share of ``best``.

    Returns:
        ``unclear``: the KL has not grown. ``paid``: reward rose with it. ``fading``: it did once,
        and by less than ``slope_share`` of that now. ``stalled``: it has not in any window.
    """
    if not trend.kl_growth >= min_kl_growth:  # nan, too
        return "unclear"
    if best is not None:
        return "fading" if trend.reward_per_kl < slope_share * best else "paid"
    return "paid" if trend.gain > min_gain * spread and trend.reward_per_kl > 0 else "stalled"


def pressure_on_update(
    stopped: Sequence[bool], *, window: int, frequent: float, patience: int
) -> int:
    """Judge how often the KL bound ended the update.

    Args:
        stopped: For each iteration since the last change, the earliest first.
        window: Iterations that the share is taken over.
        frequent: Share of stopped iterations from which on they are frequent.
        patience: Iterations without a stop after which they count as gone.

    Returns:
        1: stops are frequent. -1: there are none. 0: neither, or too early to say; between the two
        nothing changes.
    """
    recent = stopped[-window:]
    if len(recent) == window and sum(recent) >= frequent * window:
        return 1
    return -1 if len(stopped) >= patience and not any(stopped[-patience:]) else 0


class UpdatePlan(NamedTuple):
    """How much is learned from how large a buffer."""

    num_epochs: int
    """K, passes over the buffer."""
    prompts_factor: float
    """Factor on the buffer's prompts."""


def relieved_plan(
    plan: UpdatePlan,
    *,
    pressure: int,
    num_epochs: tuple[int, int],
    growth: float,
    max_factor: float,
    first: Literal["epochs", "buffer"],
) -> UpdatePlan:
    """Take one step with K or the buffer: against pressure, or back where there is none.

    The second of the two moves when the first is at its bound; the way back undoes the steps in
    reverse, so that no more than one of the two is between its bounds.

    Args:
        plan: In force.
        pressure: 1 lowers K by one or grows the buffer, -1 goes back, 0 leaves all as it is.
        num_epochs: Least and largest K.
        growth: Factor of one step of the buffer, above 1.
        max_factor: Largest factor on the buffer; the least is 1.
        first: Which of the two gives way first.
    """
    fewer = plan._replace(num_epochs=int(_clip(plan.num_epochs - pressure, *num_epochs)))
    factor = _clip(plan.prompts_factor * growth**pressure, 1.0, max_factor)
    steps = [fewer, plan._replace(prompts_factor=factor)]
    backwards = (first == "buffer") != (pressure < 0)
    return next((step for step in steps[:: -1 if backwards else 1] if step != plan), plan)


def further_cut(total: float, factor: float, *, bound: float) -> float:
    """Multiply a factor by another once more, no farther from 1 than a bound.

    Args:
        total: Product of the factors so far; 1 before the first.
        factor: The next one, below 1 to lower and above 1 to raise.
        bound: Least product if below 1, largest if above; 1 lets nothing change.
    """
    return _clip(total * factor, min(bound, 1.0), max(bound, 1.0))


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` must be above 0, got {value}.")
