"""The course of a run, as rules read it: levels, starts and gains, all by robust statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

from ppo_lightning.metrics import IterationStats

FIRST = 8
"""Rows kept from the start of a run, and from the start of the actor's training."""

RECENT = 64
"""Rows kept at the end."""

_START = 3  # rows that make the level at the start
_NOW = 5  # rows that make the present level


class Course:
    """The rows of a run up to the one that is judged, oldest first.

    Rules ask for values by field of ``IterationStats``; numbers that are not measured or not finite
    are left out of every level. A *level* is a median over a few iterations.

    Args:
        rows: At least one.
        trained: Iterations in which the actor was trained, where ``rows`` does not hold all.
    """

    def __init__(self, rows: Sequence[IterationStats], *, trained: int | None = None) -> None:
        self.rows = rows
        self.now = rows[-1]
        self._trained = trained

    # ------------------------------------------------------------------ single numbers

    def value(self, name: str) -> float | None:
        """Return the last iteration's value, or None where it is not measured or not finite."""
        return finite(getattr(self.now, name))

    def values(self, name: str, last: int | None = None) -> list[float]:
        """Return the finite values of the last rows, or of all, oldest first."""
        rows = self.rows if last is None else self.rows[-last:]
        return known(getattr(row, name) for row in rows)

    def earlier(self, name: str, last: int) -> list[float]:
        """Return the finite values of the ``last`` rows before the present one."""
        return known(getattr(row, name) for row in self.rows[:-1][-last:])

    def level(self, name: str, last: int = _NOW) -> float | None:
        """Return the median of the last rows."""
        return middle(self.values(name, last))

    def start(self, name: str, rows: int = _START) -> float | None:
        """Return the median of the first rows of the actor's training."""
        return middle(known(getattr(row, name) for row in self.trained_rows[:rows]))

    def first(self, name: str) -> float | None:
        """Return the first value that was measured."""
        return next((v for row in self.rows if (v := finite(getattr(row, name))) is not None), None)

    # ------------------------------------------------------------------ how far the run is

    @cached_property
    def trained_rows(self) -> list[IterationStats]:
        """Rows whose update moves the actor: all where nothing is known of it."""
        return [row for row in self.rows if is_trained(row)]

    @property
    def trained(self) -> int:
        """Iterations in which the actor was trained, the present one included."""
        return len(self.trained_rows) if self._trained is None else self._trained

    # ------------------------------------------------------------------ the score

    @cached_property
    def score_fields(self) -> tuple[str, str]:
        """Mean and spread of the score: the raw one, as normalisation hides the other's level."""
        raw = ("raw_score_mean", "raw_score_std")
        return raw if all(self.first(name) is not None for name in raw) else SCORE

    @cached_property
    def spread(self) -> float | None:
        """Deviation of the scores in a buffer, at the start; None unless it is above 0."""
        found = self.start(self.score_fields[1])
        return found if found else None

    @cached_property
    def gain(self) -> float | None:
        """What the mean score has gained since the start, in spreads of the start."""
        before, now = self.start(self.score_fields[0]), self.level(self.score_fields[0])
        if before is None or now is None or self.spread is None:
            return None
        return (now - before) / self.spread

    @cached_property
    def gain_error(self) -> float:
        """Standard error of ``gain``: of a difference of medians of a few means."""
        responses = self.level("num_responses") or 64.0
        return 1.25 * math.sqrt((1 / _START + 1 / _NOW) / max(responses, 1.0))

    # ------------------------------------------------------------------ the independent judge

    @cached_property
    def judged(self) -> list[tuple[int, float, float]]:
        """Iteration, gold score and its standard error (0 where unknown), oldest first."""
        found = ((row.iteration, judgement(row)) for row in self.rows)
        return [(number, *both) for number, both in found if both is not None]


SCORE = ("score_mean", "score_std")


def keep(rows: Sequence[IterationStats]) -> list[IterationStats]:
    """Return the rows that rules still look at.

    They are those of the start, of the start of the actor's training, of the end, and the two
    judgements in a row with the best gold score.
    """
    if len(rows) <= 2 * FIRST + RECENT:
        return list(rows)
    old = rows[:-RECENT]
    trained = [row.iteration for row in old if is_trained(row)][:FIRST]
    judged = [(both[0], row.iteration) for row in rows if (both := judgement(row)) is not None]
    pairs = [(a + b, at, to) for (a, at), (b, to) in pairwise(judged) if at <= old[-1].iteration]
    wanted = {row.iteration for row in old[:FIRST]} | set(trained)
    wanted |= set(max(pairs)[1:]) if pairs else set()
    return [row for row in old if row.iteration in wanted] + list(rows[-RECENT:])


def is_trained(row: IterationStats) -> bool:
    """Whether the actor was trained in an iteration, or nothing is known of it."""
    return row.actor_steps != 0


def judgement(row: IterationStats) -> tuple[float, float] | None:
    """Return gold score and standard error (0 where unknown) of the answers that were judged."""
    answers = judged_answers(row)
    gold = None if answers is None else finite(answers.gold)
    if answers is None or gold is None:
        return None
    return gold, finite(answers.gold_error) or 0.0


def judged_answers(row: IterationStats) -> Any:
    """Answers with a gold score: the likeliest ones, which vary least, if there are any."""
    for answers in (row.val_greedy, row.val_sampled):
        if answers is not None and finite(answers.gold) is not None:
            return answers
    return None


def finite(value: float | None) -> float | None:
    """Return the value, or None for one that is not measured or not finite."""
    return value if value is not None and math.isfinite(value) else None


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are measured and finite."""
    return [value for value in values if finite(value) is not None and value is not None]


def middle(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return median(values) if values else None
