"""Metrics of the scores: their distribution over all ranks, and each component's part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ppo_lightning.configs import Constraint
from ppo_lightning.functional import correlation
from ppo_lightning.metrics import ComponentStats, deviation, quotient
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.slices import ResponseRow
from ppo_lightning.rewards import RewardResult, distribution

_KINDS = ("raw", "squared", "weighted", "said", "unsaid")
# Measured elsewhere, as sums.
_ELSEWHERE = ("count", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class Share:
    """How a component enters the weighted sum: ``weight · (score - bound)``.

    Args:
        weight: Factor.
        constraint: That holds it at a bound, if there is one.
        multiplier: λ of that constraint.
    """

    weight: float
    constraint: Constraint | None = None
    multiplier: float | None = None

    @property
    def bound(self) -> float:
        """What is taken off a score."""
        return 0.0 if self.constraint is None else self.constraint.bound


def shares_of(result: RewardResult) -> dict[str, Share]:
    """Return the shares in force for a buffer, by name of the component."""
    return {
        name: Share(
            weight=weight,
            constraint=result.constraints.get(name),
            multiplier=result.multipliers.get(name),
        )
        for name, weight in result.weights.items()
    }


def score_distribution(responses: Sequence[ResponseRow]) -> dict[str, float]:
    """Describe the raw scores: fields of ``IterationStats``.

    Args:
        responses: Of all ranks.
    """
    # Sorted, so that the sum's rounding does not depend on who held which.
    together = sorted(responses)
    scores = [row.score for row in together]
    found = {
        f"raw_score_{name}": float(value)
        for name, value in distribution(scores).as_dict().items()
        if name not in _ELSEWHERE
    }
    related = {
        "score_length_correlation": correlation(scores, [float(row.length) for row in together]),
        "score_repetition_correlation": correlation(
            scores, [row.repeated_bigrams for row in together]
        ),
    }
    return found | {name: value for name, value in related.items() if not math.isnan(value)}


def component_sums(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the totals that ``component_totals`` gives."""
    return tuple(f"{kind}:{name}" for name in names for kind in _KINDS)


def component_totals(
    collected: Collected, shares: Mapping[str, Share]
) -> dict[str, Tensor | float]:
    """Add up what each component said of this rank's responses.

    Scores of the responses in the buffer; of a component that is only watched some may be missing.
    What is missing is counted among all responses that have tokens.
    """
    totals: dict[str, Tensor | float] = {}
    kept = collected.kept
    written = collected.rollout.response_mask.any(1)
    for name, raw in collected.result.components.items():
        everyone = raw.to(kept.device).double()
        said = everyone[kept]
        said = said[said.isfinite()]
        share = shares[name]
        above = said.sum() - len(said) * share.bound
        found: dict[str, Tensor | float] = {
            "raw": said.sum(),
            "squared": said.square().sum(),
            "weighted": above * share.weight,
            "said": len(said),
            "unsaid": (written & ~everyone.isfinite()).sum(),
        }
        totals |= {f"{kind}:{name}": value for kind, value in found.items()}
    return totals


def component_stats(totals: Mapping[str, float], name: str, share: Share | None) -> ComponentStats:
    """Make the record of one component from the totals of all ranks.

    Args:
        totals: By the names of ``component_sums``.
        name: Of the component.
        share: In force; None before the first buffer.
    """
    share = share or Share(weight=0.0)
    raw, held = quotient(totals, f"raw:{name}", f"said:{name}"), share.constraint
    return ComponentStats(
        raw=raw,
        weighted=quotient(totals, f"weighted:{name}", f"said:{name}"),
        std=deviation(totals, f"raw:{name}", f"squared:{name}", f"said:{name}"),
        weight=share.weight,
        multiplier=share.multiplier,
        violation=None if held is None or raw is None else held.violation(raw),
        dropped=totals[f"unsaid:{name}"],
    )
