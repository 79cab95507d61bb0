"""Thresholds of the detectors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_lightning.configs.checks import require, require_at_least, require_positive, require_within


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """When an iteration is taken for ill. None switches a detector off.

    Args:
        nonfinite_share: Share of an iteration's steps, those that a bound on a KL left out not
            counted, that were skipped as a loss or gradient was not finite. From it on the update
            is ill; odd ones below it are only counted.
        dropped_share: Share of the sampled responses that were dropped, from which on the rewards
            are taken for broken, or the networks if most of them were dropped for their numbers.
        max_kl_old: KL(old‖new) of the update, in nats per token. Healthy runs stay below 0.02, an
            actor's rate 120 times too high reached 0.8 at once.
        max_kl_ref: KL to the reference, in nats per response. Above it a jump is an explosion;
            healthy runs level at 3 to 10.
        max_kl_ref_per_token: The same for long responses, in nats per token: the larger bound of
            the two holds.
        kl_jump: Spreads above the running level that are a jump.
        kl_ceiling: Factor on the bound above which no jump is needed: a slow climb ends there.
        score_drop: Spreads below the running level at which the mean score has collapsed: the raw
            one, as normalisation keeps the other near 0. The spread is that of the level or the
            error of a difference of two means, the larger.
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

    nonfinite_share: float | None = 0.5
    dropped_share: float | None = 0.5
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
        for name in ("nonfinite_share", "dropped_share"):
            require_positive(name, getattr(self, name))
            require_within(name, getattr(self, name), 0.0, 1.0)
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


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
