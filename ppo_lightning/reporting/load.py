"""From a folder or file to the iterations of a run, whoever wrote it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_lightning.errors import ConfigError, DataError, nearest
from ppo_lightning.metrics import STEP as SUPERVISED_STEP
from ppo_lightning.metrics import IterationStats
from ppo_lightning.reporting.columns import (
    AXES,
    ITERATION,
    MAPS,
    ColumnMap,
    Values,
    derived,
    is_known,
    notes_for,
    own_map,
    recognise,
    unused,
)
from ppo_lightning.reporting.columns import OWN as OWN_COLUMNS
from ppo_lightning.reporting.events import event_files, read_events
from ppo_lightning.reporting.tables import Row, Table, all_columns, read_table

OWN_FILE, CSV_FILE = "metrics.jsonl", "metrics.csv"
_LAST = 2.0**53  # whole numbers are exact up to there


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something that the run changed itself, from its journal.

    Args:
        iteration: In which.
        source: Who did it, such as ``AdaptiveKL``.
        dial: What, such as ``kl_coef``.
        before: Its value, if it is a number.
        after: The same afterwards.
        reason: In words.
    """

    iteration: int
    source: str
    dial: str
    before: float | None = None
    after: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its log tells it.

    Args:
        path: What was read.
        kind: Of file, and who wrote it, in words.
        rows: Its iterations, rising.
        logged: The same by logged name, with what ``IterationStats`` has no field for.
        changes: What it changed itself.
        notes: What was left out or made of other numbers, a sentence each.
        unknown: Columns that mean nothing here.
    """

    path: Path
    kind: str
    rows: Sequence[IterationStats]
    logged: Sequence[Mapping[str, float]]
    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()
    unknown: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """Where other files of the run may lie."""
        return self.path if self.path.is_dir() else self.path.parent

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the iterations in which a logged name was measured and finite, and its values."""
        found = [
            (row.iteration, values[name])
            for row, values in zip(self.rows, self.logged, strict=True)
            if math.isfinite(values.get(name, math.nan))
        ]
        return [i for i, _ in found], [value for _, value in found]


def load_run(
    path: Path,
    *,
    columns: ColumnMap | None = None,
    pairs: Mapping[str, str] | None = None,
    spare: Mapping[str, str] | None = None,
) -> Run:
    """Read a run.

    Args:
        path: Its folder, or a file of it.
        columns: What its columns mean; None finds out by their names.
        pairs: Single columns of the user's own, to logged names.
        spare: The same for columns of which some may not be there, as a run has no validation.

    Raises:
        DataError: There is nothing that could be diagnosed, and why.
        ConfigError: ``pairs`` names a metric or a column that is not there.
        OSError: A file cannot be opened.
    """
    place, passed_over = _place(path)
    table = read_events(event_files(place)) if place.is_dir() else read_table(place)
    names = all_columns(table.rows)
    if SUPERVISED_STEP in names and ITERATION not in names:
        raise DataError(
            "is of supervised training: its rows are optimiser steps, not PPO iterations, and the "
            "rules are about PPO.",
            path=place,
        )
    known = columns or recognise(names)
    pairs, missing = _check_pairs(pairs or {}, spare or {}, names, place)
    if known is None and not pairs:
        raise DataError(_nothing_known(names), path=place)
    chosen = own_map(pairs, known or OWN_COLUMNS)
    merged, notes = _merged(table)
    read = derived([row.numbers for _, row in merged], [chosen.read(r.numbers) for _, r in merged])
    if not any(is_known(name) and name != ITERATION for values in read for name in values):
        raise DataError(_nothing_known(names), path=place)
    notes = [*passed_over, *notes, *missing]
    return _run(place, table, chosen, [i for i, _ in merged], read, merged, notes, names)


def _run(
    place: Path,
    table: Table,
    chosen: ColumnMap,
    numbers: Sequence[int],
    read: Sequence[Values],
    merged: Sequence[tuple[int, Row]],
    notes: Sequence[str],
    names: Sequence[str],
) -> Run:
    logged = [
        {**values, ITERATION: float(number)} for number, values in zip(numbers, read, strict=True)
    ]
    kind = f"{table.kind}, {chosen.title}" if chosen.targets else table.kind
    return Run(
        path=place,
        kind=kind,
        rows=[IterationStats.from_log(values) for values in logged],
        logged=logged,
        changes=list(_changes(merged)),
        notes=[*table.notes, *notes, *notes_for(chosen, names)],
        unknown=unused(chosen, names),
    )


# ---------------------------------------------------------------------- which file


def _place(path: Path) -> tuple[Path, list[str]]:
    """Return the file to read, or the folder of event files, and a note on what is passed over."""
    if not os.path.exists(path):  # unlike `Path.exists`, whatever the name is
        raise DataError("is not there: give a run's folder, or its log.", path=path)
    if not path.is_dir():
        return path, []
    found = _log_in(path)
    if found is not None:
        return found, []
    below: dict[Path, Path] = {}
    for folder in _folders_below(path):
        inside_one = any(above in below for above in folder.parents)  # a part of a run's own log
        if not inside_one and (place := _log_in(folder)) is not None:
            below[folder] = place
    if not below:
        raise DataError(
            f"holds no log of a run: no {OWN_FILE}, {CSV_FILE} or TensorBoard event file.",
            path=path,
        )
    versions = [folder for folder in below if _version_of(folder) is not None]
    if len(below) == 1 or (len(versions) == len(below) and len({f.parent for f in below}) == 1):
        newest = max(below, key=lambda folder: _version_of(folder) or 0)
        notes = [f"`{newest.name}` is the newest of {len(below)} versions"] * (len(below) > 1)
        return below[newest], notes
    shown = ", ".join(f"`{folder}`" for folder in sorted(below)[:5])
    more = f", and {len(below) - 5} more" if len(below) > 5 else ""
    raise DataError(f"holds several runs. Give one of them: {shown}{more}.", path=path)


def _folders_below(folder: Path) -> Iterator[Path]:
    """Yield folders of a few levels: ``lightning_logs/version_0`` is two below."""
    for pattern in ("*/", "*/*/", "*/*/*/"):
        yield from (found for found in folder.glob(pattern) if found.is_dir())


def _log_in(folder: Path) -> Path | None:
    for name in (OWN_FILE, CSV_FILE):
        if (folder / name).is_file():
            return folder / name
    return folder if event_files(folder) else None


def _version_of(folder: Path) -> int | None:
    """Return the number of a folder that a logger has named: of ``version_10`` 10."""
    name, _, digits = folder.name.partition("_")
    return int(digits) if name == "version" and digits.isdecimal() else None


# ---------------------------------------------------------------------- which columns


def _check_pairs(
    pairs: Mapping[str, str], spare: Mapping[str, str], names: Collection[str], place: Path
) -> tuple[Mapping[str, str], list[str]]:
    """Return the columns that are there, and a note on others."""
    for column in pairs:
        if column not in names:
            near = nearest(column, names)
            meant = f" Did you mean `{near}`?" if near else ""
            raise ConfigError(
                f"`--column {column}=…`: {place} has no numbers in a column `{column}`.{meant}"
            )
    there = {column: name for column, name in spare.items() if column in names}
    missing = [column for column in spare if column not in names]
    if missing and not there:
        raise ConfigError(
            f"`--columns`: {place} has none of these columns: {_listed(missing)}. It has "
            f"{_listed(names)}."
        )
    notes = [f"columns that are given and not there: {_listed(missing)}"] if missing else []
    return {**there, **pairs}, notes


def _listed(names: Collection[str]) -> str:
    shown = [f"`{name}`" for name in names][:6]
    return ", ".join(shown) + (", …" if len(names) > 6 else "")


def _nothing_known(names: Sequence[str]) -> str:
    if not names:
        return "holds no numbers."
    return (
        f"has no column that is known here; it has {_listed(names)}. Say what they are: `--columns "
        f"{'|'.join(MAPS)}|FILE.yaml`, or `--column THEIRS=rollout/kl_ref` for each."
    )


# ---------------------------------------------------------------------- which rows


@dataclass
class _Merger:
    """Rows by iteration, the latest of each."""

    rows: dict[int, Row] = field(default_factory=dict)
    last: int | None = None
    repeated: int = 0
    abandoned: int = 0
    backwards: int = 0

    def add(self, number: int, row: Row) -> None:
        """Add a row; one that goes back to a known iteration begins a resumed run."""
        goes_back = self.last is not None and number < self.last
        if goes_back and number in self.rows:
            later = [i for i in self.rows if i > number]
            self.repeated += 1
            self.abandoned += len(later)
            for i in (number, *later):
                del self.rows[i]
        elif goes_back:
            self.backwards += 1
        known = self.rows.get(number)
        if known is not None:
            row = Row(
                numbers={**known.numbers, **row.numbers}, changes=[*known.changes, *row.changes]
            )
        self.rows[number], self.last = row, number


def _merged(table: Table) -> tuple[list[tuple[int, Row]], list[str]]:
    """Return the rows by rising iteration, each once, and what happened to others."""
    axis = _axis(table)
    merger, missing = _Merger(), 0
    for place, row in enumerate(table.rows):
        number = row.numbers.get(axis, math.nan) if axis else float(place)
        if abs(number) <= _LAST:  # not of NaN either
            merger.add(int(number), row)
        else:
            missing += 1
    return sorted(merger.rows.items()), list(_notes(merger, axis, missing))


def _axis(table: Table) -> str | None:
    """Return the column that numbers the rows: one of whole numbers that do not stand still."""
    rows = [row.numbers for row in table.rows]
    for name in AXES:
        found = [row[name] for row in rows if name in row]
        whole = all(not math.isfinite(x) or x == int(x) for x in found)
        if len(found) > len(rows) // 2 and whole and (len(set(found)) > 1 or len(rows) == 1):
            return name
    return None


def _notes(merger: _Merger, axis: str | None, missing: int) -> Iterator[str]:
    if axis is None:
        yield "no column numbers the iterations: rows are counted"
    if merger.repeated:
        yield (
            f"the run was resumed {merger.repeated} time(s): the later rows of an iteration count"
        )
    if merger.backwards:
        yield f"{merger.backwards} row(s) were out of order, and sorted by `{axis}`"
    if missing:
        yield f"{missing} row(s) without a number in `{axis}` were left out"


def _changes(merged: Sequence[tuple[int, Row]]) -> Iterator[Change]:
    for number, row in merged:
        for entry in row.changes:
            yield Change(
                iteration=_whole(entry.get("iteration"), number),
                source=str(entry.get("source", "")),
                dial=str(entry["dial"]),
                before=_number(entry.get("before")),
                after=_number(entry.get("after")),
                reason=str(entry.get("reason", "")),
            )


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
