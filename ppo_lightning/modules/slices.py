"""Metrics of a buffer by response, by place in the response and by group of prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ppo_lightning.functional import (
    histogram,
    repeated_ngram_fraction,
    sums_by_position,
    whole_histogram,
)
from ppo_lightning.metrics import (
    MOST_GROUPS,
    POSITIONS,
    BufferHistograms,
    GroupStats,
    PositionStats,
    quotient,
)
from ppo_lightning.modules.collection import Collected

SUMS_BY_POSITION = tuple(
    f"{kind}_at:{name}" for kind in ("entropy", "tokens") for name in POSITIONS
)
"""Names of the totals of ``position_totals``."""
_NUM_BINS = 16


class ResponseRow(NamedTuple):
    """A response that is in the buffer, as it is compared with those of all ranks.

    Attributes:
        score: Raw.
        length: In tokens.
        repeated_bigrams: Share of its bigrams that had occurred in it.
        group: Of its prompt; empty where there are no groups.
        entropy: Sum over the tokens that the losses count, nats.
        tokens: How many these are.
    """

    score: float
    length: int
    repeated_bigrams: float
    group: str
    entropy: float
    tokens: int


def response_rows(collected: Collected) -> list[ResponseRow]:
    """Return this rank's responses that are in the buffer."""
    mask = collected.shaped.mask
    entropy = collected.networks.entropy.double().masked_fill(~mask, 0).sum(1).tolist()
    tokens = mask.sum(1).tolist()
    ids, records = collected.completions.response_ids, collected.rollout.prompts.records
    columns = zip(collected.result.raw.tolist(), ids, records, entropy, tokens, strict=True)
    return [
        ResponseRow(
            score=score,
            length=len(response),
            repeated_bigrams=repeated_ngram_fraction(response, 2),
            group=record.group,
            entropy=spread,
            tokens=count,
        )
        for kept, (score, response, record, spread, count) in zip(
            collected.kept.tolist(), columns, strict=True
        )
        if kept
    ]


def position_totals(collected: Collected) -> dict[str, Tensor | float]:
    """Sums of the entropy and numbers of tokens by place in the response, on this rank."""
    entropy, mask = collected.networks.entropy, collected.shaped.mask
    sums, counts = sums_by_position(entropy, mask, num_bins=len(POSITIONS))
    return dict(zip(SUMS_BY_POSITION, (*sums.unbind(), *counts.unbind()), strict=True))


def position_stats(totals: Mapping[str, float]) -> dict[str, PositionStats]:
    """Make the records of the places that hold a token, from the totals of all ranks."""
    means = {
        name: quotient(totals, f"entropy_at:{name}", f"tokens_at:{name}") for name in POSITIONS
    }
    return {name: PositionStats(mean=mean) for name, mean in means.items() if mean is not None}


def group_stats(rows: Sequence[ResponseRow]) -> dict[str, GroupStats]:
    """Make the records of the groups with the most responses.

    Args:
        rows: Of all ranks; sums are exact, so that their order changes no bit.

    Returns:
        By name as it is logged; the largest first, of equal ones the first by name.
    """
    members: dict[str, list[ResponseRow]] = {}
    for row in rows:
        if row.group:
            members.setdefault(group_name(row.group), []).append(row)
    largest = sorted(members, key=lambda name: (-len(members[name]), name))[:MOST_GROUPS]
    return {name: _of_group(members[name]) for name in largest}


def group_name(name: str) -> str:
    """Return a group's name as it is logged: loggers refuse some characters."""
    return re.sub(r"[^\w.-]", "_", name)


def _of_group(rows: Sequence[ResponseRow]) -> GroupStats:
    tokens = sum(row.tokens for row in rows)
    entropy = math.fsum(row.entropy for row in rows)
    return GroupStats(
        entropy=entropy / tokens if tokens else None,
        score=math.fsum(row.score for row in rows) / len(rows),
        num_responses=float(len(rows)),
    )


def buffer_histograms(rows: Sequence[ResponseRow], *, iteration: int) -> BufferHistograms:
    """Count scores and lengths in bins.

    Args:
        rows: Of all ranks.
        iteration: Of the buffer.
    """
    return BufferHistograms(
        iteration=iteration,
        raw_score=histogram([row.score for row in rows], num_bins=_NUM_BINS),
        response_length=whole_histogram([row.length for row in rows], num_bins=_NUM_BINS),
    )
