"""What each rule needs to be measured before it can say anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ppo_lightning.metrics import AnswerStats, IterationStats
from ppo_lightning.reporting.columns import NAME_OF

GOLD = "gold"
"""Stands for the gold score of any way to answer held-out prompts."""

Needs = tuple[tuple[str, ...], ...]
"""Groups of fields: of each group one is enough."""

_MEAN = ("raw_score_mean", "score_mean")
_STD = ("raw_score_std", "score_std")
_SCORE: Needs = (_MEAN, _STD)

NEEDS: Mapping[str, Needs] = {
    "reward_nonfinite": (("dropped_responses",),),
    "nonfinite_update": (
        ("policy_loss", "value_loss", "kl_old", "kl_ref", "grad_norm_actor", "grad_norm_actor_max"),
    ),
    "reward_outlier": (
        *_SCORE,
        ("raw_score_skew",),
        ("raw_score_min", "score_min"),
        ("raw_score_max", "score_max"),
    ),
    "reward_scale": (("score_std",),),
    "stale_rollouts": (("lag_mean", "kl_ref"),),
    "sampling_mismatch": (("sampler_mismatch", "first_ratio_error"),),
    "update_too_large": (("kl_old",),),
    "overfit_buffer": (("epochs_done",), ("kl_old",)),
    "length_exploitation": (
        *_SCORE,
        ("response_length_mean",),
        ("score_length_correlation",),
    ),
    "reward_hacking": (
        *_SCORE,
        (GOLD, "kl_ref", "entropy", "repeated_bigrams", "response_length_mean", "opening_share"),
    ),
    "over_optimisation": (*_SCORE, (GOLD,)),
    "policy_collapse": _SCORE,
    "kl_runaway": (("kl_ref",),),
    "entropy_collapse": (("entropy",),),
    "oscillation": _SCORE,
    "stalled": (*_SCORE, ("kl_ref",)),
    "no_reward_signal": (*_SCORE, ("kl_ref",)),
    "critic_failure": (("explained_variance",),),
    "rank_trouble": (("waiting_share",),),
}


def blind_rules(rows: Sequence[IterationStats], illnesses: Iterable[str]) -> dict[str, list[str]]:
    """Return the illnesses that cannot be seen in a run, with the metrics that are missing.

    Args:
        rows: Of the run.
        illnesses: That are looked for; of those that are not in ``NEEDS`` nothing is known.
    """
    there = measured(rows)
    found = {
        illness: [_shown(group) for group in NEEDS.get(illness, ()) if not there & {*group}]
        for illness in illnesses
    }
    return {illness: missing for illness, missing in found.items() if missing}


def measured(rows: Sequence[IterationStats]) -> set[str]:
    """Return the fields that were measured in any row, and ``GOLD``."""
    there = {name for name in NAME_OF if any(getattr(row, name) is not None for row in rows)}
    return there | ({GOLD} if any(map(_has_gold, rows)) else set())


def _has_gold(row: IterationStats) -> bool:
    ways = (row.val_greedy, row.val_sampled)
    return any(
        isinstance(way, AnswerStats) and way.gold is not None and math.isfinite(way.gold)
        for way in ways
    )


def _shown(group: Sequence[str]) -> str:
    """Name what would be enough, the first of a group."""
    return "val/…/gold" if group[0] == GOLD else NAME_OF[group[0]]
