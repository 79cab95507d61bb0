"""Rules on the reward: its scale, its outliers, and what its rise is bought with."""

from __future__ import annotations

import math
from itertools import pairwise

from ppo_lightning.diagnostics.course import Course, middle
from ppo_lightning.diagnostics.diagnosis import Evidence, Finding
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules.base import found, seen

GOLD = "val/…/gold"


def reward_scale(course: Course, limits: RuleLimits) -> Finding | None:
    """The scores that training sees are spread far wider than β and the critic are made for."""
    spread = course.level("score_std", 3)
    mean = course.level("score_mean", 3)
    if spread is None or spread <= limits.reward_spread:
        return None
    loss = course.level("value_loss", 3)
    largest = course.level("advantage_abs_max", 3)
    return found(
        "ill" if spread > limits.step_up * limits.reward_spread else "watch",
        seen("score_std", spread, limit=limits.reward_spread),
        None if mean is None else seen("score_mean", mean),
        None
        if loss is None
        else seen("value_loss", loss, note="whitening hides it from the actor"),
        None if largest is None else seen("advantage_abs_max", largest),
    )


def reward_outlier(course: Course, limits: RuleLimits) -> Finding | None:
    """One score is out of all proportion to the others."""
    mean_of, std_of = course.score_fields
    low_of, high_of = mean_of.replace("mean", "min"), mean_of.replace("mean", "max")
    skew, low, high = course.value("raw_score_skew"), course.value(low_of), course.value(high_of)
    # One outlier among n scores makes a skew of about √n, however far off it is.
    responses = max(course.value("num_responses") or 0.0, 0.0) or math.inf
    limit = min(limits.outlier_skew, 0.7 * math.sqrt(responses))
    if skew is None or abs(skew) <= limit or low is None or high is None:
        return None
    level, spread = _usual_scores(course, mean_of, std_of)
    if level is None or not spread:
        return None
    farthest = max(low, high, key=lambda score: abs(score - level))
    if abs(farthest - level) <= limits.outlier_factor * spread:
        return None
    name = high_of if farthest == high else low_of
    note = f"scores were {level:.3g} ± {spread:.3g}"
    return found(
        "ill",
        seen(name, farthest, note=note),
        seen("raw_score_skew", skew, limit=limit),
    )


def _usual_scores(course: Course, mean_of: str, std_of: str) -> tuple[float | None, float | None]:
    """Level and spread of the iterations before, or else of the middle of this buffer."""
    level, spread = middle(course.earlier(mean_of, 8)), middle(course.earlier(std_of, 8))
    if level is not None and spread is not None:
        return level, max(spread, 0.5 * (course.spread or 0.0))  # good answers are much alike
    low, high = course.value("raw_score_q25"), course.value("raw_score_q75")
    if low is None or high is None:
        return None, None
    return course.value("raw_score_median"), (high - low) / 1.35


def length_exploitation(course: Course, limits: RuleLimits) -> Finding | None:
    """The score is one for length, and length grows with it."""
    length, before = course.level("response_length_mean", 3), course.first("response_length_mean")
    correlation = course.start("score_length_correlation")
    if length is None or not before or correlation is None:
        return None
    growth, gain = length / before, course.gain
    if correlation < limits.length_correlation or growth < limits.length_growth:
        return None
    if gain is None or gain <= 0:
        return None
    return found(
        "ill",
        seen("response_length_mean", length, before=before, limit=limits.length_growth * before),
        seen(
            "score_length_correlation",
            correlation,
            limit=limits.length_correlation,
            note="at the start",
        ),
        _risen(course),
    )


def reward_hacking(course: Course, limits: RuleLimits) -> Finding | None:
    """The proxy climbs beyond sense, bought with something that nobody wanted."""
    gain = course.gain
    if gain is None or gain < limits.hacked_gain:
        return None
    gold, price = _fallen_gold(course, limits), _price(course, limits)
    if (course.judged and gold is None) or (gold is None and len(price) < 2):
        return None
    below = gold is not None and course.judged[-1][1] < course.judged[0][1]
    if _is_narrowed(course, limits):
        return found("watch", _risen(course), gold, *price)
    if below:
        return found(
            "critical" if gain > limits.critical_gain else "ill", _risen(course), gold, *price
        )
    return found("ill" if len(price) > 2 else "watch", _risen(course), *price)


def _is_narrowed(course: Course, limits: RuleLimits) -> bool:
    """Whether more entropy is lost than the gain would cost: something else takes it away."""
    entropy, first = course.value("entropy"), course.first("entropy")
    if entropy is None or first is None or entropy >= limits.entropy_share * first:
        return False
    score, before = course.value(course.score_fields[0]), course.start(course.score_fields[0])
    if score is None or before is None or course.spread is None:
        return False
    # The gain of this iteration, as the entropy is: both change fast.
    return (score - before) / course.spread < limits.narrow_gain


def over_optimisation(course: Course, limits: RuleLimits) -> Finding | None:
    """The proxy holds what it gained or still rises, while the independent judge's score falls."""
    gold = _fallen_gold(course, limits)
    if gold is None or course.gain is None or course.gain < limits.held_gain:
        return None
    kl, kl_start = course.level("kl_ref"), course.first("kl_ref")
    return found(
        "watch" if _is_narrowed(course, limits) else "ill",
        gold,
        _risen(course),
        None if kl is None else seen("kl_ref", kl, before=kl_start),
    )


def _risen(course: Course) -> Evidence:
    name = course.score_fields[0]
    gain = f"{course.gain:.2g} spreads of the scores" if course.gain is not None else ""
    return seen(name, course.level(name) or 0.0, before=course.start(name), note=gain)


def _fallen_gold(course: Course, limits: RuleLimits) -> Evidence | None:
    """Return how the gold score fell from its best, both means of two judgements in a row."""
    judged = course.judged
    if len(judged) < 4:
        return None
    pairs = [_pair(*two) for two in pairwise(judged)]
    best, best_error = max(pairs[:-2])
    now, error = pairs[-1]
    noise = math.hypot(best_error, error)
    margin = limits.gold_errors * noise if noise else limits.gold_fall * (course.spread or 0.0)
    if not margin or now >= best - margin:
        return None
    return Evidence(metric=GOLD, now=now, before=best, note="its best was the former")


def _pair(first: tuple[int, float, float], second: tuple[int, float, float]) -> tuple[float, float]:
    """Mean and standard error of two judgements."""
    return (first[1] + second[1]) / 2, math.hypot(first[2], second[2]) / 2


def _price(course: Course, limits: RuleLimits) -> tuple[Evidence, ...]:
    """Return what a rise of the proxy came with, of what hacked rewards come with."""
    length = course.level("response_length_mean", 3)
    bounds = {
        "kl_ref": limits.kl_bound(length),
        "repeated_bigrams": _plus(course.start("repeated_bigrams"), limits.repetition),
        "response_length_mean": _times(course.first("response_length_mean"), limits.length_growth),
        "opening_share": _plus(course.start("opening_share"), limits.opening_rise),
    }
    paid = [
        seen(name, level, before=course.first(name), limit=bound)
        for name, bound in bounds.items()
        if bound is not None and (level := course.level(name, 3)) is not None and level > bound
    ]
    entropy, first = course.level("entropy", 3), course.first("entropy")
    if entropy is not None and first and entropy < limits.entropy_price * first:
        bound = limits.entropy_price * first
        paid.append(seen("entropy", entropy, before=first, limit=bound))
    return tuple(paid)


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
