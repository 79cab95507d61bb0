"""The rows of a log file, whoever wrote it: numbers by column, with what had to be left out."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.io import read_jsonl
from ppo_lightning.metrics import SCHEMA_VERSION

_LONGEST_CELL = 2**31 - 1  # characters; Python's own limit is below that of a long text
_SNIFFED = 4096  # bytes that are looked at to tell text from what is none
_VERSION, _NONFINITE, _CHANGES = "schema_version", "nonfinite", "changes"
_WRAPPED = "data"
"""Key under which some frameworks put all the numbers of a row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    Args:
        numbers: By column; cells that are empty or no number are left out, NaN and infinities are
            kept.
        changes: What the run changed, as this project writes it down.
    """

    numbers: Mapping[str, float]
    changes: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a file holds.

    Args:
        kind: Of file, in words.
        rows: In order; those of several files one after the other.
        notes: What was left out, a sentence each.
    """

    kind: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=tuple)


def read_table(path: Path) -> Table:
    """Read a log file of any kind: TensorBoard's events, JSONL, a JSON list, or CSV.

    Raises:
        DataError: There is nothing in it that could be read.
        OSError: It cannot be opened.
    """
    if "tfevents" in path.name:
        from ppo_lightning.reporting.events import read_events

        return read_events([path])
    with open(path, "rb") as file:
        head = file.read(_SNIFFED)
    if not head.strip():
        raise DataError("is empty: the run has written nothing yet.", path=path)
    if b"\0" in head:
        raise DataError(
            "is a binary file, no log. Give a metrics.jsonl, CSV, JSONL or TensorBoard event file, "
            "or the folder of a run.",
            path=path,
        )
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if first == b"[" or path.suffix == ".json":
        return _read_json(path)
    return _read_jsonl(path) if first == b"{" else _read_csv(path)


# ---------------------------------------------------------------------- JSON


def _read_jsonl(path: Path) -> Table:
    bad: list[DataError] = []
    lines = list(read_jsonl(path, on_bad=bad.append))
    last = max([number for number, _ in lines] + [error.line or 0 for error in bad], default=0)
    if lines and _VERSION in lines[0][1]:
        _check_version(lines[0][1], path)
        lines = lines[1:]
    if not lines and bad:
        raise bad[0]
    rows = [row for _, record in lines if (row := _row(record)).numbers]
    kind = "metrics.jsonl" if path.name == "metrics.jsonl" else "JSONL"
    return Table(kind=kind, rows=rows, notes=list(_left_out(bad, last)))


def _check_version(head: Mapping[str, Any], path: Path) -> None:
    if head[_VERSION] != SCHEMA_VERSION:
        raise DataError(
            f"has `{_VERSION}: {head[_VERSION]}`, and this version of the package reads "
            f"{SCHEMA_VERSION}. Use the version that wrote it.",
            path=path,
            line=1,
        )


def _left_out(bad: Sequence[DataError], last: int) -> Iterator[str]:
    cut = [error for error in bad if error.line == last]
    others = [str(error.line) for error in bad if error.line != last]
    if cut:
        yield "the last line is cut off, and was left out"
    if others:
        shown = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        yield f"{_count(len(others), 'line')} could not be read, and left out: {shown}"


def _read_json(path: Path) -> Table:
    """Read a list of rows, or a trainer's state that holds one as ``log_history``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not valid JSON: {error}.", path=path) from error
    if isinstance(content, Mapping):
        content = content.get("log_history", [content])
    listed = content if isinstance(content, list) else []
    records = [item for item in listed if isinstance(item, Mapping)]
    return Table(kind="JSON", rows=[row for r in records if (row := _row(r)).numbers])


def _row(record: Mapping[str, Any]) -> Row:
    """Read one JSON object: nested ones are flattened, as ``outer/inner``."""
    nonfinite = record.get(_NONFINITE, ())
    changes = record.get(_CHANGES, ())
    numbers = dict(_numbers(record))
    if isinstance(nonfinite, list):
        numbers |= dict.fromkeys((str(name) for name in nonfinite), math.nan)
    else:
        numbers |= dict(_numbers({_NONFINITE: nonfinite}))
    return Row(numbers=numbers, changes=_changes(changes))


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, "" if name == _WRAPPED else f"{name}/")
        elif isinstance(value, int | float):
            yield name, _as_float(value)
        elif isinstance(value, str) and (number := _parsed(value)) is not None:
            yield name, number


def _changes(found: Any) -> Sequence[Mapping[str, Any]]:
    listed = found if isinstance(found, list) else []
    return [c for c in listed if isinstance(c, Mapping) and isinstance(c.get("dial"), str)]


# ---------------------------------------------------------------------- CSV


def _read_csv(path: Path) -> Table:
    text = path.read_bytes().decode("utf-8-sig", errors="replace").lstrip("\r\n")
    lines = text.splitlines()
    delimiter = max(",\t;", key=lines[0].count)
    csv.field_size_limit(_LONGEST_CELL)
    try:
        head, *cells = list(csv.reader(lines, delimiter=delimiter))
    except (csv.Error, ValueError) as error:
        raise DataError(f"is not a table that can be read: {error}.", path=path) from error
    if len(head) < 2:
        raise DataError(
            f"is no log: its first line, {_short(lines[0])}, is neither JSON nor the names of "
            "several columns.",
            path=path,
            line=1,
        )
    notes = []
    names = [name.strip() for name in head]
    if cells and len(cells[-1]) < len(names) and not text.endswith(("\n", "\r")):
        cells.pop()
        notes.append("the last line is cut off, and was left out")
    rows = [row for line in cells if (row := _csv_row(names, line)).numbers]
    return Table(kind="CSV", rows=rows, notes=notes)


def _csv_row(names: Sequence[str], cells: Sequence[str]) -> Row:
    pairs = zip(names, cells, strict=False)  # what is short or long was cut or mended by hand
    read = ((name, _parsed(cell)) for name, cell in pairs if name)
    return Row(numbers={name: value for name, value in read if value is not None})


def _parsed(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return {"true": 1.0, "false": 0.0}.get(cell.strip().lower())


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf if value > 0 else -math.inf


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:59] + "…")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def all_columns(rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns in which anything was measured, in order."""
    return list(dict.fromkeys(name for row in rows for name in row.numbers))
