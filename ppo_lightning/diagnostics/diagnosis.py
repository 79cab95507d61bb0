"""What a rule says of a run: how bad it is, by which figures, since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["watch", "ill", "critical"]

SEVERITIES: tuple[Severity, ...] = ("watch", "ill", "critical")
"""From the mildest: something to look at; a run that will not get well by itself; one that is
being lost now."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One measurement that speaks for an illness.

    Args:
        metric: Its logged name, such as ``rollout/kl_ref``.
        now: Its value, or its level over the last iterations.
        before: What it was, if it is a change that speaks.
        limit: What it passed, if there is a limit.
        note: Anything that the figures do not say.
    """

    metric: str
    now: float
    before: float | None = None
    limit: float | None = None
    note: str = ""

    def __str__(self) -> str:
        change = f" is {self.now:.4g}"
        if self.before is not None:
            change = f" went from {self.before:.4g} to {self.now:.4g}"
        limit = "" if self.limit is None else f" (limit {self.limit:.4g})"
        return f"`{self.metric}`{change}{limit}" + (f": {self.note}" if self.note else "")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rule sees in the last iteration.

    Args:
        severity: How bad it is at this moment.
        evidence: The most telling measurement first.
        form: Which form of the illness it is, where they are treated differently.
    """

    severity: Severity
    evidence: tuple[Evidence, ...]
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """An illness of a run, as it stands after an iteration.

    Args:
        illness: Its name, such as ``kl_runaway``.
        severity: How bad it is, its companions included; a companion itself is never more than
            ``watch``.
        since: Iteration in which it first showed in this episode.
        iteration: The last iteration in which it was seen.
        evidence: The most telling measurement first.
        companion_of: The illness that accounts for it, if there is one.
        form: Which form of the illness it is, where they are treated differently.
        until: Iteration in which it was found to be over; None while it lasts.
        alone: How bad it is itself: of one with companions without them, of a companion too.
    """

    illness: str
    severity: Severity
    since: int
    iteration: int
    evidence: tuple[Evidence, ...]
    companion_of: str | None = None
    form: str = ""
    until: int | None = None
    alone: Severity = "watch"

    @property
    def span(self) -> str:
        """When it was there, in words that follow its name."""
        if self.until is None:
            return f"since iteration {self.since}"
        if self.since == self.iteration:
            return f"in iteration {self.since}, over since {self.until}"
        return f"in iterations {self.since} to {self.iteration}, over since {self.until}"

    def __str__(self) -> str:
        of = "" if self.companion_of is None else f", a companion of {self.companion_of}"
        head = f"{self.illness} ({self.severity}{of}), {self.span}"
        return f"{head}: {'; '.join(map(str, self.evidence))}."


def rank_of(severity: Severity) -> int:
    """Return 0 for the mildest severity, and more for worse ones."""
    return SEVERITIES.index(severity)


def worst(severities: Sequence[Severity]) -> Severity | None:
    """Return the worst of some severities; None of none."""
    return max(severities, key=rank_of, default=None)
