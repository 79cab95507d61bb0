"""Rules on who sampled, and on how the ranks work together."""

from __future__ import annotations

from ppo_lightning.diagnostics.course import Course
from ppo_lightning.diagnostics.diagnosis import Evidence, Finding, Severity
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules.base import found, seen


def stale_rollouts(course: Course, limits: RuleLimits) -> Finding | None:
    """The responses are not the current policy's, nor as old as the run is set up for."""
    lag, kl = course.value("lag_mean"), course.value("kl_ref")
    allowed = course.value("lag_allowed") or 0.0
    capped = course.value("importance_capped_share")
    corrected = course.now.importance_mean is not None
    if lag and corrected:
        if capped is None or capped <= limits.capped_share:
            return None
        note = f"weights correct a lag of {lag:.2g} updates, and too many are cut"
        return found(
            "ill", seen("importance_capped_share", capped, limit=limits.capped_share, note=note)
        )
    negative = None
    if kl is not None and kl < -limits.negative_kl:
        negative = seen("kl_ref", kl, limit=-limits.negative_kl, note="a KL is never negative")
    if lag and lag >= allowed + limits.stale_lag:
        return found("ill", seen("lag_mean", lag, limit=allowed + limits.stale_lag), negative)
    if lag and lag > allowed:
        return found("watch", seen("lag_mean", lag), negative)
    return None if negative is None else found("ill", negative)


def sampling_mismatch(course: Course, limits: RuleLimits) -> Finding | None:
    """Sampler and trainer disagree on the same weights."""
    mismatch, ratio = course.value("sampler_mismatch"), course.value("first_ratio_error")
    if course.value("lag_mean"):
        return None
    if ratio is not None and ratio > limits.ratio_error:
        note = "new and old policy are the same weights there"
        return found("ill", seen("first_ratio_error", ratio, limit=limits.ratio_error, note=note))
    if (early := _early_kl(course, limits)) is not None:
        return found("watch", early)
    if mismatch is None or mismatch <= limits.mismatch:
        return None
    severity: Severity = "ill" if mismatch > limits.step_up * limits.mismatch else "watch"
    return found(severity, seen("sampler_mismatch", mismatch, limit=limits.mismatch))


def _early_kl(course: Course, limits: RuleLimits) -> Evidence | None:
    """Return the KL to the reference that is there before any update."""
    kl, bound = course.value("kl_ref"), limits.first_bound(course.value("response_length_mean"))
    if course.now.iteration != 0 or kl is None or abs(kl) <= bound:
        return None
    note = "before any update; the reference is another model than the policy, or scored otherwise"
    return seen("kl_ref", kl, limit=bound, note=note)


def rank_trouble(course: Course, limits: RuleLimits) -> Finding | None:
    """A rank spends its time waiting for the others."""
    waiting = course.level("waiting_share")
    if course.now.waiting_share is None:
        return None  # a run that goes on with one rank waits for nobody
    if waiting is None or waiting <= limits.waiting_share or len(course.rows) < 4:
        return None
    severity: Severity = "ill" if waiting > 2 * limits.waiting_share else "watch"
    return found(severity, seen("waiting_share", waiting, limit=limits.waiting_share))
