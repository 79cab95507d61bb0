"""What happened in a run, by iteration: illnesses that came and went, and what was done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ppo_lightning.diagnostics import SEVERITIES
from ppo_lightning.reporting.examination import OF_DOCTOR, Examination
from ppo_lightning.reporting.load import Change

Kind = Literal["begin", "end", "action"]


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One line of a timeline.

    Args:
        iteration: When.
        kind: An illness that shows, one that is over, or something that was changed.
        what: Illness or dial.
        text: The line, without the iteration.
    """

    iteration: int
    kind: Kind
    what: str
    text: str


def timeline(examination: Examination) -> list[Happening]:
    """Return all that happened, by iteration."""
    found = [*_of_illnesses(examination), *map(_of_change, examination.actions)]
    return sorted(found, key=lambda happening: happening.iteration)


def thinned(happenings: Sequence[Happening], most: int) -> list[Happening]:
    """Return at most so many lines: those about illnesses first, then changes, each evenly.

    A law that steers a dial turns it in every iteration, which would hide everything else.
    """
    illnesses = _evenly([h for h in happenings if h.kind != "action"], most)
    room = most - len(illnesses)
    actions = _evenly([h for h in happenings if h.kind == "action"], room)
    kept = {id(happening) for happening in (*illnesses, *actions)}
    return [happening for happening in happenings if id(happening) in kept]


def _evenly(happenings: Sequence[Happening], most: int) -> Sequence[Happening]:
    """Return at most so many of them, the first one always."""
    if len(happenings) <= most:
        return happenings
    return [happenings[i * len(happenings) // most] for i in range(most)]


def _of_illnesses(examination: Examination) -> Iterator[Happening]:
    for spell in examination.spells:
        episode, name = spell.episode, spell.episode.illness
        evidence = f": {episode.evidence[0]}" if episode.evidence else ""
        text = f"{name} shows, at its worst {episode.severity}{evidence}"
        yield Happening(iteration=episode.since, kind="begin", what=name, text=text)
        if spell.ending:
            text = f"{name} is {spell.ending.partition(' in iteration')[0]}"
            yield Happening(iteration=spell.last, kind="end", what=name, text=text)


def _of_change(change: Change) -> Happening:
    reason = f": {change.reason}" if change.reason else ""
    if change.dial.startswith(OF_DOCTOR):
        what = f"{change.dial.removeprefix(OF_DOCTOR)} {_level(change.after)}"
    else:
        what = f"{change.dial} {values_of(change)}".rstrip()
    text = f"{change.source}: {what}{reason}"
    return Happening(iteration=change.iteration, kind="action", what=change.dial, text=text)


def _level(after: float | None) -> str:
    """Return the severity that the callback ``Doctor`` has noted: 0 where it is gone."""
    names = ("over", *SEVERITIES)
    place = int(after or 0)
    return names[place] if 0 <= place < len(names) else f"{after:g}"


def values_of(change: Change) -> str:
    """Return what a dial was and is, if these are numbers."""
    if change.before is None and change.after is None:
        return ""
    if change.before is None:
        return f"→ {change.after:.4g}"
    after = "none" if change.after is None else f"{change.after:.4g}"
    return f"{change.before:.4g} → {after}"
