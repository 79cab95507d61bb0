"""Rules on how far the policy goes: in one update, and from the reference."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median

from ppo_lightning.diagnostics.course import Course, finite, middle
from ppo_lightning.diagnostics.diagnosis import Evidence, Finding, Severity
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules.base import found, seen
from ppo_lightning.metrics import IterationStats


def update_too_large(course: Course, limits: RuleLimits) -> Finding | None:
    """An update goes so far that its buffer says nothing of the new policy."""
    return None if _has_many_epochs(course, limits) else _far_update(course, limits)


def overfit_buffer(course: Course, limits: RuleLimits) -> Finding | None:
    """An update goes too far by many passes over one buffer."""
    finding = _far_update(course, limits) if _has_many_epochs(course, limits) else None
    if finding is None:
        return None
    most, now = _most_epochs(course), course.value("epochs_done") or 0.0
    epochs = seen("epochs_done", now, before=most if now < most else None, limit=limits.many_epochs)
    return found(finding.severity, *finding.evidence, epochs)


def _has_many_epochs(course: Course, limits: RuleLimits) -> bool:
    return _most_epochs(course) >= limits.many_epochs


def _most_epochs(course: Course) -> float:
    """Most passes of late: an update that is stopped early makes fewer than it was meant to."""
    return max(course.values("epochs_done", 16), default=0.0)


def _far_update(course: Course, limits: RuleLimits) -> Finding | None:
    kl, clipped = course.value("kl_old"), course.value("clip_fraction")
    share = None if clipped is None else seen("clip_fraction", clipped, limit=limits.clip_fraction)
    if kl is not None and kl > limits.step_up * limits.kl_old:
        # A mean of exponentials: few clipped tokens are one token of a huge ratio, not an update.
        wide = clipped is None or clipped > limits.clip_watch
        jump = seen("kl_old", kl, limit=limits.step_up * limits.kl_old)
        return found("critical" if wide else "watch", jump, share)
    far = kl is not None and kl > limits.kl_old
    if kl is not None and far and (clipped is None or clipped > limits.clip_fraction):
        return found("ill", seen("kl_old", kl, limit=limits.kl_old), share)
    if clipped is not None and clipped > limits.clip_watch:
        return found("watch", seen("clip_fraction", clipped, limit=limits.clip_watch))
    return None


def policy_collapse(course: Course, limits: RuleLimits) -> Finding | None:
    """The mean score fell far below its level; with it most of the entropy, at the worst."""
    mean_of, std_of = course.score_fields
    mean, before = course.value(mean_of), course.earlier(mean_of, 8)
    level, spread = middle(before), middle(course.earlier(std_of, 8))
    if mean is None or level is None or spread is None or len(before) < 2:
        return None
    noise = middle([abs(value - level) for value in before]) or 0.0
    margin = max(limits.score_fall * spread, limits.score_noise * noise)
    if not (spread > 0 and mean < level - margin):
        return None
    entropy, first = course.value("entropy"), course.first("entropy")
    lost = entropy is not None and first and entropy < limits.collapsed_entropy * first
    return found(
        "critical" if lost else "ill",
        seen(mean_of, mean, before=level, limit=level - margin),
        seen("entropy", entropy, before=first) if lost and entropy is not None else None,
    )


def kl_runaway(course: Course, limits: RuleLimits) -> Finding | None:
    """KL to the reference grows, and nothing holds it."""
    kl = course.level("kl_ref", 3)
    bound = limits.kl_bound(course.level("response_length_mean", 3))
    if kl is None or kl <= bound:
        return None
    before = middle(course.values("kl_ref", 11)[:-6])
    growing = before is None or kl > limits.kl_growth * before
    loose = _unheld(course, limits)
    evidence = (seen("kl_ref", kl, before=course.first("kl_ref"), limit=bound), loose)
    if kl > limits.kl_critical * bound:
        return found("critical", *evidence)
    ill = growing and (loose is not None or kl > limits.kl_growing * bound)
    ill = ill or kl > limits.kl_far * bound
    return found("ill" if ill else "watch", *evidence)


def _unheld(course: Course, limits: RuleLimits) -> Evidence | None:
    """Return β where the penalty is next to nothing beside the scores."""
    coef, kl = course.value("kl_coef"), course.level("kl_ref", 3)
    spread = course.level("score_std", 3)
    if coef is None or kl is None or not spread:
        return None
    if coef * kl >= limits.penalty_share * spread:
        return None
    return seen("kl_coef", coef, note=f"the penalty is {coef * kl / spread:.1%} of the spread")


def entropy_collapse(course: Course, limits: RuleLimits) -> Finding | None:
    """The policy says ever the same: entropy lost too much, or too much at once."""
    entropy, first = course.value("entropy"), course.first("entropy")
    if entropy is None or first is None or first <= 0:
        return None
    evidence = seen("entropy", entropy, before=first, limit=limits.entropy_share * first)
    if entropy < limits.entropy_share * first:
        severity: Severity = "critical" if entropy < limits.entropy_critical * first else "ill"
        return found(
            "watch" if _is_hacked(course, limits) else severity, evidence, _openings(course)
        )
    level = middle(course.earlier("entropy", 3))
    if level is not None and entropy < (1 - limits.entropy_fall) * level:
        note = "in one iteration"
        return found("ill", seen("entropy", entropy, before=level, note=note), _openings(course))
    parts = _thinned_parts(course, limits)
    return found("watch", *parts[:3]) if parts else None


def _is_hacked(course: Course, limits: RuleLimits) -> bool:
    """Whether the gold score is so far below its start that the loss of entropy matters less."""
    gold, spread = course.judged, course.spread
    return bool(gold and spread and gold[-1][1] < gold[0][1] - limits.hacked_gold * spread)


def _thinned_parts(course: Course, limits: RuleLimits) -> list[Evidence]:
    """Return the places and groups of prompts that lost as much entropy alone, the worst first.

    A part holds few tokens, so that its level is a median of three iterations.
    """
    lost = []
    for name, values in _entropy_of_parts(course).items():
        first, level = values[0], median(values[-3:])
        bound = limits.entropy_share * first
        if len(values) >= 3 and level < bound:
            lost.append(
                (level / first, Evidence(metric=name, now=level, before=first, limit=bound))
            )
    return [evidence for _, evidence in sorted(lost, key=lambda pair: pair[0])]


def _entropy_of_parts(course: Course) -> dict[str, list[float]]:
    """Entropy, oldest first, of the parts that the last iteration has, by logged name."""
    parts = [_parts(row) for row in course.rows]
    return {name: [row[name] for row in parts if name in row] for name in parts[-1]}


def _parts(row: IterationStats) -> dict[str, float]:
    """Entropy of an iteration's places and groups of prompts, where it is above 0."""
    places = {f"rollout/entropy_at/{name}/mean": at.mean for name, at in row.entropy_at.items()}
    groups = {f"rollout/group/{name}/entropy": of.entropy for name, of in row.groups.items()}
    known = {name: finite(value) for name, value in (places | groups).items()}
    return {name: value for name, value in known.items() if value is not None and value > 0}


def _openings(course: Course) -> Evidence | None:
    share, first = course.value("opening_share"), course.first("opening_share")
    return None if share is None else seen("opening_share", share, before=first)


def oscillation(course: Course, limits: RuleLimits) -> Finding | None:
    """The score swings back and forth from one iteration to the next."""
    name = course.score_fields[0]
    means = course.values(name, 9)
    if len(means) < 9 or course.spread is None:
        return None
    steps = [after - before for before, after in pairwise(means)]
    turns = sum(a * b < 0 for a, b in pairwise(steps))
    size = (middle([abs(step) for step in steps]) or 0.0) / course.spread
    responses = max(course.level("num_responses", 9) or 64.0, 1.0)
    noise = 0.67 * math.sqrt(2 / responses)  # median step of a mean of so many equal scores
    if size < max(limits.swing, 3 * noise) or turns < limits.swing_turns:
        return None
    note = f"{turns} turns in 8 iterations of {size:.2g} spreads of the scores"
    return found("ill", seen(name, means[-1], before=means[-2], note=note))
