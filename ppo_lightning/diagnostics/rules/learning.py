"""Rules on whether anything is learnt, by the policy and by the critic."""

from __future__ import annotations

import math

from ppo_lightning.diagnostics.course import Course, middle
from ppo_lightning.diagnostics.diagnosis import Evidence, Finding, Severity
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules.base import found, seen

HELD_BACK, TOO_SLOW = "held back", "too slow"
"""Forms of a stall."""

CATCHING_UP, DIVERGING, BLIND = "catching up", "diverging", "blind"
"""Forms of a critic's failure."""


def no_reward_signal(course: Course, limits: RuleLimits) -> Finding | None:
    """All answers are scored alike, or the policy moves and the score does not."""
    mean_of, std_of = course.score_fields
    spread, mean = course.value(std_of), course.value(mean_of)
    if spread is not None and spread <= 1e-6 * max(abs(mean or 0.0), 1e-6):
        solved = course.gain is not None and course.gain > limits.flat_gain
        same = seen(std_of, spread, note="every response has the same score")
        return found("watch" if solved else "ill", same)
    kl, gain = course.level("kl_ref"), course.gain
    if kl is None or gain is None or course.trained <= limits.patience or kl < limits.moved_kl:
        return None
    wanted = _least_gain(kl, limits)
    if gain + course.gain_error > wanted or _heavy_penalty(course, kl, limits) is not None:
        return None
    note = f"a gain of {gain:.2g} spreads where {math.sqrt(2 * kl):.2g} could be had for this KL"
    return found(
        "ill",
        seen(mean_of, course.level(mean_of) or 0.0, before=course.start(mean_of), note=note),
        seen("kl_ref", kl, before=course.first("kl_ref"), limit=limits.moved_kl),
    )


def stalled(course: Course, limits: RuleLimits) -> Finding | None:
    """The score does not rise, and the policy does not move or is taken back."""
    kl, gain = course.level("kl_ref"), course.gain
    if kl is None or gain is None or course.trained <= limits.patience:
        return None
    heavy = _heavy_penalty(course, kl, limits)
    if gain > (limits.flat_gain if heavy is None else _least_gain(kl, limits)):
        return None
    length = course.level("response_length_mean", 3)
    mean_of = course.score_fields[0]
    level, start = course.level(mean_of) or 0.0, course.start(mean_of)
    flat = seen(mean_of, level, before=start, note=f"a gain of {gain:.2g} spreads")
    bound = limits.still_bound(length)
    if heavy is not None:
        return found("ill", heavy, flat, seen("kl_ref", kl), form=HELD_BACK)
    if abs(kl) > bound:
        return None
    evidence = (seen("kl_ref", kl, limit=bound), flat)
    moved = course.level("kl_old")
    if moved is not None and moved * (length or 1.0) * course.trained > max(2 * abs(kl), 1e-3):
        note = "updates move the policy, and the penalty takes it back"
        return found("ill", *evidence, seen("kl_old", moved, note=note), form=HELD_BACK)
    step = None if moved is None else seen("kl_old", moved, note="updates hardly move the policy")
    severity: Severity = "watch" if abs(kl) > 0.1 * bound else "ill"
    return found(severity, *evidence, step, form=TOO_SLOW)


def _least_gain(kl: float, limits: RuleLimits) -> float:
    """Gain, in spreads, that a KL must have bought."""
    wanted = min(limits.efficiency * math.sqrt(2 * max(kl, 0.0)), limits.bought_gain)
    return max(wanted, limits.flat_gain)


def _heavy_penalty(course: Course, kl: float, limits: RuleLimits) -> Evidence | None:
    """Return β where a small KL costs more than all differences of the scores are worth."""
    coef, spread = course.value("kl_coef"), course.level("score_std", 3)
    near = kl < limits.kl_bound(course.level("response_length_mean", 3))
    if coef is None or not spread or not near or coef * kl < limits.heavy_penalty * spread:
        return None
    return seen("kl_coef", coef, note=f"the penalty is {coef * kl / spread:.2g} spreads")


def critic_failure(course: Course, limits: RuleLimits) -> Finding | None:
    """The critic predicts worse than a constant would, or nothing at all."""
    recent = course.values("explained_variance", 4)
    if not recent:
        return None
    now, limit = recent[-1], -limits.explained_variance
    loss = course.level("value_loss", 3)
    height = None if loss is None else seen("value_loss", loss, before=course.first("value_loss"))
    if now < -limits.absurd_variance or (
        now < limit and sum(value < limit for value in recent) >= 3
    ):
        worse = seen("explained_variance", now, limit=limit, note="worse than a constant")
        falls = loss is not None and loss < 0.9 * (course.first("value_loss") or 0.0)
        return found("ill", worse, height, form=CATCHING_UP if falls else DIVERGING)
    known = course.values("explained_variance")
    level = middle([abs(value) for value in known[-5:]])
    if level is None or len(known) <= limits.blind_after or level >= limits.dim_variance:
        return None
    late = len(known) > 2 * limits.blind_after
    limit = limits.dim_variance if late else limits.blind_variance
    blind = seen("explained_variance", now, limit=limit, note="it sees next to nothing")
    return found("ill" if level < limit else "watch", blind, height, form=BLIND)
