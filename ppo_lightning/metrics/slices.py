"""Metrics of slices of the buffer: by place in the response, and by group of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.metrics.schema import metric

_LAST = 14  # 2 to this power and beyond are one bin

POSITIONS = (
    "0",
    "1",
    *(f"{2**k}-{2 ** (k + 1) - 1}" for k in range(1, _LAST)),
    f"{2**_LAST}-up",
)
"""Names of the bins of places in a response, counted from 0; each is twice as wide as the last."""


MOST_GROUPS = 16
"""Groups of prompts that are logged: those with the most responses."""


@dataclass(frozen=True, kw_only=True)
class PositionStats:
    """Tokens at some places of their responses: ``rollout/entropy_at/<places>/…``."""

    mean: float | None = metric(
        "mean",
        "nats per token",
        "mean over tokens",
        "the entropy of `rollout/entropy`, of tokens at these places in the response",
        note="low at the first places all answers begin alike; `mean` of all tokens together is "
        "`rollout/entropy`",
    )


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """Responses to the prompts of one part of a mixture: ``rollout/group/<name>/…``."""

    entropy: float | None = metric(
        "entropy",
        "nats per token",
        "mean over tokens",
        "the entropy of `rollout/entropy`, of these responses",
        note="a fall in one group alone points to its prompts, or to the reward on them",
    )
    score: float | None = metric(
        "score",
        "reward",
        "mean over responses",
        "raw score, as `rollout/raw_score_mean`, of these responses",
    )
    num_responses: float | None = metric(
        "num_responses", "responses", "total", "these responses, those left out not counted"
    )
