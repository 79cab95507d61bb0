"""Rules on numbers that are not finite, and on scores that are missing."""

from __future__ import annotations

import math

from ppo_lightning.diagnostics.course import Course
from ppo_lightning.diagnostics.diagnosis import Finding, Severity
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules.base import found, seen

SPREADING = "spreading"
"""Form of numbers that are not finite where skipping a step was not the end of it."""

_OF_THE_UPDATE = (
    *("policy_loss", "value_loss", "kl_old", "update_entropy"),
    *("grad_norm_actor", "grad_norm_critic", "grad_norm_actor_max", "grad_norm_critic_max"),
)
_OF_THE_BUFFER = ("kl_ref", "entropy")


def nonfinite_update(course: Course, limits: RuleLimits) -> Finding | None:
    """A loss, gradient or log-probability is not finite, or steps were skipped for it."""
    now = course.now
    skipped, taken = now.steps_skipped_nonfinite or 0.0, now.steps_taken or 0.0
    names = _OF_THE_BUFFER + (() if skipped else _OF_THE_UPDATE)
    for name in names:
        value = getattr(now, name)
        if value is not None and not math.isfinite(value):
            return found("critical", seen(name, value, note="it is not finite"), form=SPREADING)
    if now.nonfinite_responses:
        share = now.nonfinite_responses / max(now.num_responses or now.nonfinite_responses, 1.0)
        severity = _by_share(share, 0.0, limits)
        note = "responses of which a network gave a number that is not finite"
        evidence = seen("nonfinite_responses", now.nonfinite_responses, note=note)
        return found(severity, evidence, form=SPREADING)
    share = skipped / max(skipped + taken, 1.0)
    if not skipped:
        return None
    severity = _by_share(share, limits.skipped_share, limits)
    note = f"of {skipped + taken:.0f} steps"
    form = SPREADING if severity == "critical" else ""
    return found(severity, seen("steps_skipped_nonfinite", skipped, note=note), form=form)


def reward_nonfinite(course: Course, limits: RuleLimits) -> Finding | None:
    """Responses have no usable score."""
    name, unscored = _unscored(course)
    if not unscored > 0:
        return None
    sampled = max(course.now.num_responses or 0.0, unscored)
    severity = _by_share(unscored / sampled, limits.dropped_share, limits)
    note = f"of {sampled:.0f} responses, for their scores"
    return found(severity, seen(name, unscored, note=note))


def _unscored(course: Course) -> tuple[str, float]:
    """Field and number of the responses without a usable score; of foreign logs as it follows."""
    now = course.now
    if now.unscored_responses is not None:
        return "unscored_responses", now.unscored_responses
    others = (now.stale_dropped or 0.0) + (now.nonfinite_responses or 0.0)
    return "dropped_responses", (now.dropped_responses or 0.0) - others


def _by_share(share: float, ill: float, limits: RuleLimits) -> Severity:
    """Severity of a fault by the share that has it."""
    return "critical" if share >= limits.broken_share else "ill" if share >= ill else "watch"
