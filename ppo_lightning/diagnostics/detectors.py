"""Signs that a run has fallen ill so badly that it should go back: each detector is pure.

A detector reads the iterations of a run, oldest first, the last being the one that is judged, and
returns a `Verdict` or None. Running levels are medians and their spreads median absolute
deviations, so that one odd iteration neither sounds an alarm later nor hides one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least, require_positive, require_within
from ppo_lightning.metrics import AnswerStats, IterationStats
from ppo_lightning.types import Verdict

History = Sequence[IterationStats]
Detector = Callable[[History, "DetectorConfig"], Verdict | None]

SOURCE = "detectors"
UPDATE_ILLNESSES = frozenset({"nonfinite_update", "update_too_large"})
"""Found in the update itself: the policy that the iteration began with was still well."""

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """When an iteration is taken for ill. None switches a detector off.

    Args:
        nonfinite_steps: Skipped steps in iterations in a row, the last included, that make a streak
            (an iteration in which no step at all could be taken is one by itself).
        max_kl_old: KL(old‖new) of the update, in nats per token. Healthy runs stay below 0.02, an
            actor's rate 120 times too high reached 0.8 at once.
        max_kl_ref: KL to the reference, in nats per response. Above it a jump is an explosion;
            healthy runs level at 3 to 10.
        max_kl_ref_per_token: The same for long responses, in nats per token: the larger bound of
            the two holds.
        kl_jump: Spreads above the running level that are a jump.
        kl_ceiling: Factor on the bound above which no jump is needed: a slow climb ends there.
        score_drop: Spreads below the running level at which the mean score has collapsed. The
            spread is that of the level or the error of a difference of two means, the larger.
        min_score_drop: Least drop that counts, in deviations of the scores within a buffer.
        entropy_floor: Share of the first iteration's entropy; healthy runs kept 0.59 of it.
        entropy_fall: Share of the running level that entropy may lose at once; healthy runs lost
            0.07 in an iteration, a hacked one 0.46.
        gold_drop: Errors of a difference of two validations' mean gold scores below the best one,
            at ``gold_patience`` validations in a row.
        gold_patience: See there. A state after a single such validation is not kept.
        min_gold_drop: Least drop that counts, in the gold reward's own unit; where the error of the
            mean is not measured it alone decides, and 0 leaves the detector silent.
        window: Iterations that make the running level.
        margin: How far within the bounds on KL and entropy a state must be to be worth keeping: to
            go back to the brink would not help.

    Source:
        The documentation's table of illnesses; figures are measured on small labelled runs.
    """

    nonfinite_steps: int | None = 3
    max_kl_old: float | None = 0.2
    max_kl_ref: float | None = 10.0
    max_kl_ref_per_token: float = 0.1
    kl_jump: float = 4.0
    kl_ceiling: float | None = 3.0
    score_drop: float | None = 4.0
    min_score_drop: float = 0.5
    entropy_floor: float | None = 0.5
    entropy_fall: float | None = 0.3
    gold_drop: float | None = 3.0
    gold_patience: int = 2
    min_gold_drop: float = 0.0
    window: int = 8
    margin: float = 0.1

    def __post_init__(self) -> None:
        require_at_least("nonfinite_steps", self.nonfinite_steps, 1)
        for name in ("max_kl_old", "max_kl_ref", "score_drop", "gold_drop", "kl_jump"):
            require_positive(name, getattr(self, name))
        require_at_least("kl_ceiling", self.kl_ceiling, 1.0)
        for name in ("max_kl_ref_per_token", "min_score_drop", "min_gold_drop"):
            require_at_least(name, getattr(self, name), 0.0)
        for name in ("entropy_floor", "entropy_fall"):
            require_within(name, getattr(self, name), 0.0, 1.0)
        require_at_least("gold_patience", self.gold_patience, 1)
        require(self.window >= 2, f"`window` must be at least 2, got {self.window}.")
        require_within("margin", self.margin, 0.0, 0.5)

    def tightened(self) -> DetectorConfig:
        """Return the bounds that a state worth keeping must respect."""
        floor = self.entropy_floor
        return replace(
            self,
            max_kl_old=_scaled(self.max_kl_old, 1 - self.margin),
            max_kl_ref=_scaled(self.max_kl_ref, 1 - self.margin),
            max_kl_ref_per_token=self.max_kl_ref_per_token * (1 - self.margin),
            entropy_floor=None if floor is None else min(floor * (1 + self.margin), 1.0),
            gold_patience=1,
        )


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


def nonfinite_streak(history: History, config: DetectorConfig) -> Verdict | None:
    """Steps were skipped again and again, or the policy's own numbers are not finite."""
    if config.nonfinite_steps is None:
        return None
    now = history[-1]
    for name in ("kl_ref", "entropy"):
        value = getattr(now, name)
        if value is not None and not math.isfinite(value):
            return _verdict(now, "nonfinite_update", f"`{name}` of the buffer is {value}.")
    skipped = 0.0
    for row in reversed(history):
        if not row.steps_skipped_nonfinite:
            break
        skipped += row.steps_skipped_nonfinite
    if skipped >= config.nonfinite_steps or (skipped and not now.steps_taken):
        taken = f"{now.steps_taken or 0:.0f} were taken in the last iteration"
        evidence = f"{skipped:.0f} steps with a loss or gradient that is not finite; {taken}."
        return _verdict(now, "nonfinite_update", evidence)
    return None


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
    before = [row for row in history[:-1] if _finite(row.score_mean)]
    if config.score_drop is None or now.score_mean is None or not before:
        return None
    level, spread = _running([row.score_mean for row in before], config.window)
    deviation = max(_running([row.score_std for row in before], config.window)[0], 0.0)
    widest = max(deviation, now.score_std or 0.0)
    error = widest * math.sqrt(2 / max(now.num_responses or 1.0, 1.0))
    drop = max(config.score_drop * max(spread, error), config.min_score_drop * deviation)
    if not now.score_mean < level - drop or not drop > 0:
        return None
    evidence = (
        f"The mean score is {now.score_mean:.3g}, {level - now.score_mean:.3g} below its running "
        f"level of {level:.3g}, where {drop:.3g} is tolerated."
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
    judged = [answers for row in history if (answers := _judged(row)) is not None]
    if config.gold_drop is None or _judged(now) is None or len(judged) <= config.gold_patience:
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
    nonfinite_streak,
    update_explosion,
    kl_explosion,
    score_collapse,
    entropy_collapse,
    gold_drop,
)


def trimmed(history: History, keep: int) -> list[IterationStats]:
    """Return the last ``keep`` rows and those older ones that a detector still looks at.

    Args:
        history: Oldest first.
        keep: Rows at the end that all stay.
    """
    old, recent = list(history[:-keep]), list(history[-keep:])
    first = next((row for row in history if _finite(row.entropy)), None)
    judged = [(answers.gold, row) for row in old if (answers := _judged(row)) is not None]
    best = max(judged, key=lambda pair: pair[0], default=(0.0, None))[1]
    return [row for row in old if row is first or row is best] + recent


def _running(values: Sequence[float | None], window: int) -> tuple[float, float]:
    """Return level and spread of the last finite values; zeros where there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)][-window:]
    if not known:
        return 0.0, 0.0
    level = median(known)
    return level, _MAD_TO_DEVIATION * median(abs(value - level) for value in known)


def _judged(row: IterationStats) -> Any:
    """Answers with a gold score: the likeliest ones, which vary least, if there are any."""
    for answers in (row.val_greedy, row.val_sampled):
        if answers is not None and _finite(answers.gold):
            return answers
    return None


def _gold_error(answers: AnswerStats) -> float:
    """Return the standard error of the mean gold score; 0 where it was not measured."""
    return getattr(answers, "gold_error", None) or 0.0


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _verdict(row: IterationStats, illness: str, evidence: str) -> Verdict:
    return Verdict(illness=illness, evidence=evidence, iteration=row.iteration, source=SOURCE)
