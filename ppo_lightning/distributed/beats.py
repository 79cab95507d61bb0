"""What the ranks say of themselves, and what follows from it: who keeps the others waiting.

Pure: no clock, no store, no thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

from ppo_lightning.distributed.progress import BETWEEN, START

State = Literal["runs", "failed", "lost", "ended"]
Kind = Literal["failed", "told", "gone", "silent", "stuck", "ended", "deadlock", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What one rank says of itself.

    Args:
        rank: Its number.
        machine: See ``machine_name``.
        host: The machine's name for people.
        pid: Number of its process there.
        birth: Of its process; see ``birth_of``.
        number: Counts up: a rank whose number stands still is not heard.
        state: ``failed`` with an error of its own, ``lost`` since another rank is, or ``ended``.
        stage: What it does.
        iteration: Number of the iteration or epoch.
        step: Step of it.
        idle: Seconds since it last made progress.
        waiting: Whether it waits for other ranks.
        where: Line of code that it is in, once it has been idle for a while.
        message: Of the error, or of what it has found out about another rank.
        heard: Ranks whose end it knows of.
    """

    rank: int
    machine: str
    host: str
    pid: int
    birth: int | None
    number: int = 0
    state: State = "runs"
    stage: str = START
    iteration: int = 0
    step: int = 0
    idle: float = 0.0
    waiting: bool = False
    where: str = ""
    message: str = ""
    heard: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Read what ``to_json`` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"heard": tuple(fields["heard"])})

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.stage == START:
            return "the start, before the first stage"
        stage = self.stage if self.stage == BETWEEN else f"`{self.stage}`"
        return f"{stage}, iteration {self.iteration}, step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A rank as another one sees it.

    Args:
        beat: What it last said.
        silent: Seconds since then, on the clock of the one that looks.
        gone: Whether its process has surely ended.
    """

    beat: Beat
    silent: float = 0.0
    gone: bool = False

    @property
    def idle(self) -> float:
        """Seconds without progress."""
        return self.beat.idle + self.silent


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whom the others wait for in vain.

    Args:
        kind: Why.
        ranks: Which; none where they cannot be told.
        text: The same in words, with where each rank stands.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str


def judge(seen: Mapping[int, Seen], *, me: int, timeout: float) -> Finding | None:
    """Say which ranks are waited for in vain, or None.

    A rank that is slow and makes progress is never one of them, however long the others wait.

    Args:
        seen: Every rank, this one too.
        me: This rank.
        timeout: Seconds without a beat, or without progress, that are too many.
    """
    ended = end_of_others(seen, me=me)
    if ended is not None:
        return ended
    running = {r: s for r, s in seen.items() if s.beat.state == "runs"}
    silent = [r for r, s in running.items() if r != me and s.silent > timeout]
    if silent:
        return found("silent", silent, seen)
    # By its own word: one that has fallen silent is no rank that is known to stand still.
    late = {r: s for r, s in running.items() if s.beat.idle > timeout}
    stuck = [r for r, s in late.items() if not s.beat.waiting]
    waiting = [r for r in late if r not in stuck]
    loading = any(s.beat.stage == START for s in running.values())
    if not late or loading:
        return None
    if stuck:
        nowhere = any(running[r].beat.stage == BETWEEN for r in stuck)
        if waiting or (len(late) == len(running) > 1 and not nowhere):
            return found("stuck", stuck, seen)
        return None
    if len(late) < len(running):
        return None  # they wait for one that is at work
    left = [r for r, s in seen.items() if s.beat.state == "ended"]
    return found("ended", left, seen) if left else found("deadlock", waiting, seen)


def end_of_others(seen: Mapping[int, Seen], *, me: int) -> Finding | None:
    """Say which other ranks have come to an end that is no regular one, or None."""
    others = {r: s for r, s in seen.items() if r != me}
    failed = [r for r, s in others.items() if s.beat.state == "failed"]
    if failed:
        return found("failed", failed, seen)
    told = [s.beat for s in others.values() if s.beat.state == "lost" and s.beat.message]
    if told:
        return Finding(kind="told", ranks=(told[0].rank,), text=told[0].message)
    gone = [r for r, s in others.items() if s.gone and s.beat.state == "runs"]
    return found("gone", gone, seen) if gone else None


def found(kind: Kind, ranks: Iterable[int], seen: Mapping[int, Seen]) -> Finding:
    """Put a finding in words."""
    named = tuple(ranks)
    said = [_SAID[kind](seen[rank]) for rank in named] if kind in _SAID else [_SUMMARY[kind]]
    others = {r: s for r, s in seen.items() if r not in named or kind not in _SAID}
    return Finding(kind=kind, ranks=named, text=" ".join([*said, *_standing(others)]))


def _failed(seen: Seen) -> str:
    beat = seen.beat
    end = "" if beat.message.endswith((".", "!", "?")) else "."
    return f"rank {beat.rank} failed in {beat.place}: {beat.message}{end}"


def _gone(seen: Seen) -> str:
    beat = seen.beat
    return (
        f"rank {beat.rank} is gone: its process ({beat.pid} on `{beat.host}`) ended without a "
        f"word. It was in {beat.place}."
    )


def _silent(seen: Seen) -> str:
    beat = seen.beat
    return (
        f"rank {beat.rank} (process {beat.pid} on `{beat.host}`) has not been heard from for "
        f"{seen.silent:.0f} s: stopped, or not reachable. It was in {beat.place}."
    )


def _stuck(seen: Seen) -> str:
    beat = seen.beat
    where = f" at {beat.where}" if beat.where else ""
    return f"rank {beat.rank} has made no progress for {seen.idle:.0f} s in {beat.place}{where}."


def _left(seen: Seen) -> str:
    return f"rank {seen.beat.rank} has ended its run while the others wait for it."


_SAID = {"failed": _failed, "gone": _gone, "silent": _silent, "stuck": _stuck, "ended": _left}
_SUMMARY = {
    "deadlock": "no rank is at work: all wait for each other.",
    "unknown": "the ranks have lost each other, and none is known to be gone.",
}


def _standing(seen: Mapping[int, Seen]) -> list[str]:
    """Say where ranks stand, those at one place together."""
    rows = sorted((_stands(s), rank) for rank, s in seen.items())
    parts = []
    for text, group in groupby(rows, key=lambda row: row[0]):
        ranks = [rank for _, rank in group]
        idle = max(seen[rank].idle for rank in ranks)
        since = f" for {idle:.0f} s" if seen[ranks[0]].beat.state == "runs" else ""
        parts.append((ranks[0], f"{named_ranks(ranks)}: {text}{since}"))
    if not parts:
        return []
    return [f"{'; '.join(text for _, text in sorted(parts))}."]


def _stands(seen: Seen) -> str:
    beat = seen.beat
    if beat.state == "ended":
        return "has ended"
    if beat.state != "runs":
        return f"in {beat.place}, has {'failed' if beat.state == 'failed' else 'given up'}"
    doing = "waits for other ranks" if beat.waiting else "without progress"
    where = f" ({beat.where})" if beat.where else ""
    return f"in {beat.place}{where}, {doing}"


def named_ranks(ranks: Iterable[int]) -> str:
    """Write ``rank 3`` or ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(words)}"
