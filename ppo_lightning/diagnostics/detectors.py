"""Signs that a run has fallen ill so badly that it should go back: each detector is pure.

A detector reads the iterations of a run, oldest first, the last being the one that is judged, and
returns a `Verdict` or None. Running levels are medians and their spreads median absolute
deviations, so that one odd iteration neither sounds an alarm later nor hides one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from ppo_lightning.diagnostics.course import judged_answers
from ppo_lightning.diagnostics.illnesses import UPDATE_ILLNESSES
from ppo_lightning.diagnostics.thresholds import DetectorConfig
from ppo_lightning.metrics import AnswerStats, IterationStats

if TYPE_CHECKING:  # it would load torch, which reading a run does without
    from ppo_lightning.types import Verdict

History = Sequence[IterationStats]
Detector = Callable[[History, DetectorConfig], "Verdict | None"]

SOURCE = "detectors"
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


def detect(
    history: History, config: DetectorConfig, *, source: str = SOURCE
) -> tuple[Verdict, ...]:
    """Ask every detector about the last iteration.

    Args:
        history: Healthy iterations, oldest first, and the one to judge.
        config: Thresholds.
        source: Who asks; stands in the verdicts.

    Returns:
        One verdict for each detector that found something.
    """
    found = (detector(history, config) for detector in DETECTORS)
    return tuple(replace(verdict, source=source) for verdict in found if verdict is not None)


def all_measured_finite(stats: IterationStats) -> bool:
    """Whether losses, KLs, entropy, score and gradient norms are finite as far as measured."""
    measured = (
        *(stats.policy_loss, stats.value_loss, stats.kl_ref, stats.kl_old, stats.entropy),
        *(stats.score_mean, stats.grad_norm_actor, stats.grad_norm_critic),
    )
    return all(value is None or math.isfinite(value) for value in measured)


def nonfinite_update(history: History, config: DetectorConfig) -> Verdict | None:
    """Too many steps were skipped, or the policy's own numbers are not finite."""
    now = history[-1]
    if config.nonfinite_share is None:
        return None
    if (name := _nonfinite_in_buffer(now)) is not None:
        evidence = f"`{name}` of the buffer is {getattr(now, name)}."
        return _verdict(now, "nonfinite_update", evidence)
    skipped, taken = now.steps_skipped_nonfinite or 0.0, now.steps_taken or 0.0
    if not skipped or skipped < config.nonfinite_share * (skipped + taken):
        return None
    evidence = (
        f"{skipped:.0f} of {skipped + taken:.0f} steps had a loss or gradient that is not finite; "
        f"{config.nonfinite_share:.0%} of them are an illness."
    )
    return _verdict(now, "nonfinite_update", evidence)


def dropped_responses(history: History, config: DetectorConfig) -> Verdict | None:
    """So many responses were dropped that the rewards, or the networks, must be broken."""
    now = history[-1]
    dropped, sampled = now.dropped_responses or 0.0, now.num_responses or 0.0
    dropped -= now.stale_dropped or 0.0  # by a rule, and no sign of illness
    if config.dropped_share is None or not dropped or dropped < config.dropped_share * sampled:
        return None
    by_network = now.nonfinite_responses or 0.0
    evidence = (
        f"{dropped:.0f} of {sampled:.0f} responses were dropped, {by_network:.0f} of these for "
        "numbers of a network that are not finite, the others for their scores or for want of "
        f"tokens; {config.dropped_share:.0%} are an illness."
    )
    illness = "nonfinite_update" if 2 * by_network > dropped else "reward_nonfinite"
    return _verdict(now, illness, evidence)


def update_explosion(history: History, config: DetectorConfig) -> Verdict | None:
    """The update moved the policy so far that its buffer says nothing of it any more."""
    now = history[-1]
    if config.max_kl_old is None or now.kl_old is None or not now.kl_old > config.max_kl_old:
        return None
    evidence = f"KL(old‖new) is {now.kl_old:.3g} nats per token, more than {config.max_kl_old:.3g}."
    return _verdict(now, "update_too_large", evidence)


def kl_explosion(history: History, config: DetectorConfig) -> Verdict | None:
    """KL to the reference is beyond its bound and jumped there, or is beyond any sense."""
    now = history[-1]
    if config.max_kl_ref is None or now.kl_ref is None:
        return None
    bound = max(config.max_kl_ref, config.max_kl_ref_per_token * (now.response_length_mean or 0.0))
    if not now.kl_ref > bound:
        return None
    level, spread = _running([row.kl_ref for row in history[:-1]], config.window)
    jump = level + config.kl_jump * max(spread, 0.05 * bound)
    beyond = config.kl_ceiling is not None and now.kl_ref > config.kl_ceiling * bound
    if not (beyond or now.kl_ref > jump):
        return None
    evidence = (
        f"KL to the reference is {now.kl_ref:.3g} nats per response, more than {bound:.3g}; its "
        f"running level was {level:.3g}."
    )
    return _verdict(now, "kl_runaway", evidence)


def score_collapse(history: History, config: DetectorConfig) -> Verdict | None:
    """The mean score fell far below its running level."""
    now = history[-1]
    mean_of, std_of = _score_fields(history)
    before = [row for row in history[:-1] if _finite(getattr(row, mean_of))]
    mean, std = getattr(now, mean_of), getattr(now, std_of)
    if config.score_drop is None or mean is None or not before:
        return None
    level, spread = _running([getattr(row, mean_of) for row in before], config.window)
    deviation = _running([getattr(row, std_of) for row in before], config.window)[0]
    widest = max(deviation, std or 0.0)
    error = widest * math.sqrt(2 / max(now.num_responses or 1.0, 1.0))
    drop = max(config.score_drop * max(spread, error), config.min_score_drop * deviation)
    if not mean < level - drop or not drop > 0:
        return None
    evidence = (
        f"The mean score (`{mean_of}`) is {mean:.3g}, {level - mean:.3g} below its running level "
        f"of {level:.3g}, where {drop:.3g} is tolerated."
    )
    return _verdict(now, "policy_collapse", evidence)


def entropy_collapse(history: History, config: DetectorConfig) -> Verdict | None:
    """Entropy lost too much of the first iteration's, or too much at once."""
    now = history[-1]
    before = [row.entropy for row in history[:-1] if _finite(row.entropy)]
    if now.entropy is None or not before or before[0] is None:
        return None
    first = before[0]
    level, spread = _running(before, min(config.window, 3))
    if config.entropy_floor is not None and now.entropy < config.entropy_floor * first:
        evidence = (
            f"Entropy is {now.entropy:.3g} nats per token, {now.entropy / first:.0%} of the first "
            f"iteration's {first:.3g}."
        )
        return _verdict(now, "entropy_collapse", evidence)
    if config.entropy_fall is None:
        return None
    if now.entropy < level - max(config.entropy_fall * level, 4 * spread):
        evidence = (
            f"Entropy fell at once to {now.entropy:.3g} nats per token from a level of {level:.3g}."
        )
        return _verdict(now, "entropy_collapse", evidence)
    return None


def gold_drop(history: History, config: DetectorConfig) -> Verdict | None:
    """The independent judge's score fell below its best, at some validations in a row."""
    now = history[-1]
    judged = [answers for row in history if (answers := judged_answers(row)) is not None]
    if config.gold_drop is None or not is_judged(now) or len(judged) <= config.gold_patience:
        return None
    before, recent = judged[: -config.gold_patience], judged[-config.gold_patience :]
    best = max(before, key=lambda answers: answers.gold)
    noise = math.hypot(_gold_error(best), _gold_error(recent[-1]))
    margin = max(config.gold_drop * noise, config.min_gold_drop)
    if not (margin > 0 and max(answers.gold for answers in recent) < best.gold - margin):
        return None
    evidence = (
        f"The gold score is {recent[-1].gold:.3g}, its best was {best.gold:.3g}; {margin:.3g} less "
        f"is tolerated ({len(recent)} validations in a row)."
    )
    return _verdict(now, "over_optimisation", evidence)


DETECTORS: tuple[Detector, ...] = (
    nonfinite_update,
    dropped_responses,
    update_explosion,
    kl_explosion,
    score_collapse,
    entropy_collapse,
    gold_drop,
)


def against_keeping(history: History, config: DetectorConfig) -> tuple[Verdict, ...]:
    """Return what speaks against going back, later, to the state after the last iteration.

    Between validations the last one goes on speaking: states after a fall of the gold score must
    not take the place of those before it.

    Args:
        history: Healthy iterations, oldest first.
        config: Thresholds; they are tightened.
    """
    near = config.tightened()
    last = max((i for i, row in enumerate(history) if is_judged(row)), default=len(history) - 1)
    earlier = None if last == len(history) - 1 else gold_drop(history[: last + 1], near)
    return detect(history, near) + (() if earlier is None else (earlier,))


def is_of_update_alone(verdicts: Sequence[Verdict], now: IterationStats) -> bool:
    """Whether an illness says nothing against the policy that the iteration began with.

    Where the buffer's own numbers were not finite, or no step could be taken, that policy is the
    first to be suspected.

    Args:
        verdicts: Of one iteration.
        now: That iteration.
    """
    in_update = all(verdict.illness in UPDATE_ILLNESSES for verdict in verdicts)
    buffer_is_well = _nonfinite_in_buffer(now) is None and not now.nonfinite_responses
    return in_update and buffer_is_well and now.steps_taken != 0


def is_judged(row: IterationStats) -> bool:
    """Whether the iteration has a validation with a gold score."""
    return judged_answers(row) is not None


def trimmed(history: History, keep: int) -> list[IterationStats]:
    """Return the last ``keep`` rows and those older ones that a detector still looks at.

    Args:
        history: Oldest first.
        keep: Rows at the end that all stay.
    """
    old, recent = list(history[:-keep]), list(history[-keep:])
    first = next((row for row in history if _finite(row.entropy)), None)
    judged = [(answers.gold, row) for row in old if (answers := judged_answers(row)) is not None]
    best = max(judged, key=lambda pair: pair[0], default=(0.0, None))[1]
    return [row for row in old if row is first or row is best] + recent


def _running(values: Sequence[float | None], window: int) -> tuple[float, float]:
    """Return level and spread of the last finite values; zeros where there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)][-window:]
    if not known:
        return 0.0, 0.0
    level = median(known)
    return level, _MAD_TO_DEVIATION * median(abs(value - level) for value in known)


def _nonfinite_in_buffer(row: IterationStats) -> str | None:
    """Name a measurement of the policy on its own buffer that is not finite."""
    for name in ("kl_ref", "entropy"):
        value = getattr(row, name)
        if value is not None and not math.isfinite(value):
            return name
    return None


def _score_fields(history: History) -> tuple[str, str]:
    """Fields of mean and spread of the score: the raw ones, unless the history lacks them."""
    raw = ("raw_score_mean", "raw_score_std")
    known = [all(getattr(row, name) is not None for name in raw) for row in history]
    return raw if known[-1] and any(known[:-1]) else ("score_mean", "score_std")


def _gold_error(answers: AnswerStats) -> float:
    """Return the standard error of the mean gold score; 0 where it was not measured."""
    return getattr(answers, "gold_error", None) or 0.0


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _verdict(row: IterationStats, illness: str, evidence: str) -> Verdict:
    from ppo_lightning.types import Verdict

    return Verdict(illness=illness, evidence=evidence, iteration=row.iteration, source=SOURCE)
