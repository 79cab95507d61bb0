"""Answers of a run that are worth a person's judgement: the best scored, and the suspicious."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ppo_lightning.functional import repeated_ngram_fraction
from ppo_lightning.types import Message

__all__ = ["TOP", "Candidate", "choose", "reasons"]

TOP = "top score"
"""Reason of answers that are not suspicious: they score highest."""

OUTLIER = 3.5  # robust z
REPETITIVE = 0.5  # share of an answer's word pairs that it has used before
DISAGREE = 0.5  # in ranks from 0 to 1
_FEWEST = 5  # numbers that can have an outlier
_NORMAL = 1.4826  # makes the median of |x - median| a standard deviation
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An answer of the policy, and what is known of it.

    Args:
        prompt: What was asked; of a chat the last turn of the user.
        messages: The chat; None for a plain prompt.
        policy: The answer.
        sft: The SFT model's answer to the same; None where it must be made.
        score: Of the reward that was trained on; None if unknown.
        gold: Of the independent judge.
        kl_ref: Nats of the whole answer.
        sft_score: As ``score``, of the SFT model's answer.
        sft_gold: As ``gold``.
        source: File it was read from.
    """

    prompt: str
    messages: tuple[Message, ...] | None = None
    policy: str
    sft: str | None = None
    score: float | None = None
    gold: float | None = None
    kl_ref: float | None = None
    sft_score: float | None = None
    sft_gold: float | None = None
    source: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """The prompt as a record has it."""
        if self.messages is None:
            return {"prompt": self.prompt}
        return {"messages": [dict(turn) for turn in self.messages]}

    @property
    def key(self) -> str:
        """Names the question and the policy's answer."""
        text = json.dumps([self.asked, self.policy], ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def choose(candidates: Sequence[Candidate], num: int) -> list[tuple[Candidate, list[str]]]:
    """Pick half by their score and half by what is suspicious, each kind in turn.

    Args:
        candidates: Without repetitions.
        num: At most so many.

    Returns:
        Each with the reasons for which it was picked or might have been; the best scored first.
    """
    why = reasons(candidates)
    scored = [i for i, candidate in enumerate(candidates) if _known(candidate.score)]
    best = sorted(scored, key=lambda i: (-_number(candidates[i].score), i))
    kinds = list(dict.fromkeys(kind for found in why for kind in found))
    queues = {kind: _by_strength(why, kind) for kind in kinds}
    picked: dict[int, None] = {}
    for i in best[: math.ceil(num / 2) if kinds else num]:
        picked[i] = None
    while len(picked) < num and any(queues.values()):
        for queue in queues.values():
            while queue and queue[0] in picked:
                queue.pop(0)
            if queue and len(picked) < num:
                picked[queue.pop(0)] = None
    for i in [*best, *range(len(candidates))]:  # what is left, the best scored first
        if len(picked) < num:
            picked[i] = None
    top = set(best[: len(picked)])
    return [(candidates[i], [*([TOP] if i in top else []), *why[i]]) for i in picked]


def reasons(candidates: Sequence[Candidate]) -> list[dict[str, float]]:
    """Say of every candidate what is suspicious about it, and how strongly.

    Outliers are farther than 3.5 robust standard deviations (median distance from the median) from
    the others; among fewer than five there is none.

    Returns:
        For each, by reason, a number that is larger the more it stands out.
    """
    columns: dict[str, list[float | None]] = {
        "reward outlier": [_far(z) for z in _robust_z([c.score for c in candidates])],
        "high KL": [_far(z, up=True) for z in _robust_z([c.kl_ref for c in candidates])],
        "length outlier": [
            _far(z) for z in _robust_z([math.log1p(len(c.policy)) for c in candidates])
        ],
        "high score, low gold": _disagreement(candidates),
        "repetitive": [_repetition(c.policy) for c in candidates],
    }
    found: list[dict[str, float]] = [{} for _ in candidates]
    for kind, strengths in columns.items():
        for own, strength in zip(found, strengths, strict=True):
            if strength is not None:
                own[kind] = strength
    return found


def _by_strength(why: Sequence[Mapping[str, float]], kind: str) -> list[int]:
    having = [i for i, found in enumerate(why) if kind in found]
    return sorted(having, key=lambda i: (-why[i][kind], i))


def _far(z: float | None, *, up: bool = False) -> float | None:
    if z is None:
        return None
    distance = z if up else abs(z)
    return distance if distance > OUTLIER else None


def _robust_z(values: Sequence[float | None]) -> list[float | None]:
    """Distance from the median in robust standard deviations; None where that means nothing."""
    known = [_number(value) for value in values if _known(value)]
    if len(known) < _FEWEST:
        return [None] * len(values)
    middle = median(known)
    spread = _NORMAL * median(abs(value - middle) for value in known)
    if spread < _LEAST_SPREAD:
        return [None] * len(values)
    return [(_number(v) - middle) / spread if _known(v) else None for v in values]


def _disagreement(candidates: Sequence[Candidate]) -> list[float | None]:
    """By how much an answer ranks higher by the trained reward than by the judge."""
    both = [i for i, c in enumerate(candidates) if _known(c.score) and _known(c.gold)]
    found: list[float | None] = [None] * len(candidates)
    if len(both) < _FEWEST:
        return found
    scores = _ranks([_number(candidates[i].score) for i in both])
    golds = _ranks([_number(candidates[i].gold) for i in both])
    for i, score, gold in zip(both, scores, golds, strict=True):
        found[i] = score - gold if score - gold >= DISAGREE else None
    return found


def _ranks(values: Sequence[float]) -> list[float]:
    """From 0, the lowest, to 1; equal values share the mean of their places."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    most = max(len(values) - 1, 1)
    return [sum(places[value]) / len(places[value]) / most for value in values]


def _repetition(text: str) -> float | None:
    words = text.split()
    # A script without spaces is one word: its characters are looked at.
    units = words if len(words) > 1 else list(text)
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    share = repeated_ngram_fraction([numbers[unit] for unit in units], 2)
    return share if share >= REPETITIVE else None


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: float | None) -> float:
    assert value is not None
    return float(value)
