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
    """Return at most so many lines: all about illnesses first, then changes evenly from the rest.

    A law that steers a dial turns it in every iteration, which would hide everything else.
    """
    room = most - sum(h.kind != "action" for h in happenings)
    actions = [h for h in happenings if h.kind == "action"]
    if len(actions) <= max(room, 0):
        return list(happenings)
    step = len(actions) / max(room, 1)
    kept = {id(actions[int(i * step)]) for i in range(max(room, 1))}
    return [h for h in happenings if h.kind != "action" or id(h) in kept]


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
