"""A run examined from its first to its last iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ppo_lightning.diagnostics import (
    Diagnosis,
    Episode,
    Examiner,
    Rule,
    RuleLimits,
    Severity,
    rank_of,
    worst,
)
from ppo_lightning.reporting.load import Change, Run
from ppo_lightning.reporting.needs import blind_rules

EXIT_CODES: Mapping[Severity | None, int] = {None: 0, "watch": 0, "ill": 3, "critical": 4}
"""Exit code by the worst that was found; 2 is for what cannot be read."""

_RESTORED = "state"  # the dial of a journal's entry on a rollback
OF_DOCTOR = "illness "
"""Begins the dial of a journal's entry on an illness, by the callback ``Doctor``."""


@dataclass(frozen=True, kw_only=True)
class Spell:
    """A stretch of iterations in which an illness was seen.

    Args:
        episode: What the examiner says of it.
        last: Its last iteration.
        undone_in: Iteration of the rollback that has undone it; None if there was none.
    """

    episode: Episode
    last: int
    undone_in: int | None = None

    @property
    def ending(self) -> str:
        """How it ended, in words; empty if it lasts."""
        if self.undone_in is not None:
            return f"undone by the rollback in iteration {self.undone_in}"
        return "" if self.episode.until is None else f"over in iteration {self.episode.until}"


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found in a run.

    Args:
        run: The run.
        diagnoses: The worst episode of each illness, the leading one first; without what a
            rollback has undone.
        spells: All stretches in which an illness was seen, by time.
        blind: Illnesses that cannot be seen in it, with the metrics that are missing.
        limits: Thresholds of the rules.
        ignored: Illnesses that were not looked for.
    """

    run: Run
    diagnoses: Sequence[Diagnosis]
    spells: Sequence[Spell]
    blind: Mapping[str, Sequence[str]]
    limits: RuleLimits
    ignored: Sequence[str] = ()

    @property
    def severity(self) -> Severity | None:
        """The worst of all; None where nothing was found."""
        return worst([d.severity for d in self.diagnoses])

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        return EXIT_CODES[self.severity]

    @property
    def actions(self) -> list[Change]:
        """What the run changed, and what it noted of illnesses that are not seen here."""
        seen = {OF_DOCTOR + spell.episode.illness for spell in self.spells}
        return [change for change in self.run.changes if change.dial not in seen]


def examine(
    run: Run,
    *,
    rules: Sequence[Rule],
    limits: RuleLimits = RuleLimits(),  # noqa: B008 (frozen)
    ignored: Sequence[str] = (),
) -> Examination:
    """Ask the rules about every iteration of a run.

    A rollback of the run makes the examiner forget what it has undone, as the ``Doctor`` does: the
    iterations after it go on from the state before.

    Args:
        run: At least one iteration.
        rules: Those to ask, the ignored ones left out here.
        limits: Thresholds.
        ignored: Illnesses that are not looked for.
    """
    asked = [rule for rule in rules if rule.illness not in ignored]
    examiner = Examiner(asked, limits)
    restored = dict(_restored(run.changes))
    spells: list[Spell] = []
    for row in run.rows:
        examiner.examine(row)
        if row.iteration in restored:
            spells += _undo(examiner, restored[row.iteration], at=row.iteration)
    last = run.rows[-1].iteration
    spells += [
        Spell(episode=e, last=last if e.until is None else e.until) for e in examiner.episodes
    ]
    return Examination(
        run=run,
        diagnoses=examiner.summary(),
        spells=sorted(spells, key=lambda s: (s.episode.since, -rank_of(s.episode.severity))),
        blind=blind_rules(run.rows, [rule.illness for rule in asked]),
        limits=limits,
        ignored=ignored,
    )


def _undo(examiner: Examiner, restored: int, *, at: int) -> list[Spell]:
    """Forget what came after an iteration; return what is gone."""
    before = [replace(episode) for episode in examiner.episodes]
    examiner.undo_after(restored)
    kept = {(e.illness, e.since): e.severity for e in examiner.episodes}
    gone = [e for e in before if kept.get((e.illness, e.since)) != e.severity]
    return [Spell(episode=episode, last=at, undone_in=at) for episode in gone]


def _restored(changes: Sequence[Change]) -> Iterator[tuple[int, int]]:
    """Yield iterations in which the run went back, and to which."""
    for change in changes:
        if change.dial == _RESTORED and change.after is not None and math.isfinite(change.after):
            yield change.iteration, int(change.after)
