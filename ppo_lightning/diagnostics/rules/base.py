"""What a rule is, and what rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ppo_lightning.diagnostics.course import Course
from ppo_lightning.diagnostics.diagnosis import Evidence, Finding, Severity
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.metrics import IterationStats, metric_specs


class Rule(ABC):
    """Look for one illness in the course of a run.

    A rule judges the last iteration alone: whether it counts at once, how long it is remembered
    and what it is a companion of is up to ``Examiner``, by the attributes below.

    Args:
        illness: Name of the illness; one of one's own may need none of the documented ones.
        confirm: Iterations in which it must be seen, of the last ``confirm + 1``, before it is more
            than ``watch``; ``critical`` needs no confirmation.
        lasting: Least severity from which it stays, once confirmed, whatever follows: a jump ruins
            a run for good, and all is calm afterwards. None lets it pass.
    """

    illness: str
    confirm: int = 2
    lasting: Severity | None = None

    @abstractmethod
    def examine(self, course: Course, limits: RuleLimits) -> Finding | None:
        """Return what is seen in the last iteration, or None.

        Args:
            course: The run so far; numbers that are missing are None there.
            limits: Thresholds.
        """


Sign = Callable[[Course, RuleLimits], Finding | None]


@dataclass(frozen=True)
class SignRule(Rule):
    """A rule that is a pure function."""

    illness: str
    sign: Sign
    confirm: int = 2
    lasting: Severity | None = None

    def examine(self, course: Course, limits: RuleLimits) -> Finding | None:
        """Ask the function."""
        return self.sign(course, limits)


LOGGED = {attribute: spec.name for attribute, spec in metric_specs(IterationStats).items()}
"""Logged name of each field."""


def seen(
    attribute: str,
    now: float,
    *,
    before: float | None = None,
    limit: float | None = None,
    note: str = "",
) -> Evidence:
    """Make evidence of a field of ``IterationStats``."""
    name = LOGGED[attribute]
    return Evidence(metric=name, now=now, before=before, limit=limit, note=note)


def found(severity: Severity, *evidence: Evidence | None, form: str = "") -> Finding:
    """Make a finding of the evidence that there is."""
    there = tuple(e for e in evidence if e is not None)
    return Finding(severity=severity, evidence=there, form=form)
