"""``metrics.jsonl``: one line an iteration, the file that all other views are made from.

Runs of supervised fine-tuning and of reward models write the same file by optimiser steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from ppo_lightning.errors import DataError
from ppo_lightning.io import append_jsonl, finite, read_jsonl, set_aside, write_text_atomic
from ppo_lightning.metrics.schema import SCHEMA_VERSION
from ppo_lightning.metrics.stats import ITERATION, IterationStats
from ppo_lightning.metrics.supervised import STEP, StepStats

_VERSION = "schema_version"
_NONFINITE = "nonfinite"
_CHANGES = "changes"

_Stats = TypeVar("_Stats", bound=StepStats)


class RowWriter:
    """Append rows to a JSONL file of a run; used by one process of the run.

    The first line is a header with the version of the schema. A new run does not write into the
    file of an earlier one, which is kept as ``metrics.1.jsonl`` (or the next free number); a
    resumed run goes on in it, see ``resume``.

    Args:
        path: The file; made at the first row.
        axis: Logged name of the number that the rows stand on.
    """

    def __init__(self, path: str | PathLike[str], *, axis: str = ITERATION) -> None:
        self.path = Path(path)
        self.axis = axis
        self._last: int | None = None

    def resume(self, iteration: int) -> None:
        """Go on with ``iteration``: rows of it and of later ones are dropped, for it comes again.

        Args:
            iteration: The first that will be written; a step for a supervised run.

        Raises:
            DataError: The file is not one of this schema's version, or a row in it is broken (the
                last one may be: a killed process leaves it so).
        """
        rows = read_rows(self.path, self.axis) if self.path.exists() else []
        kept = [row for row in rows if row[self.axis] < iteration]
        self._start(kept)
        self._last = iteration - 1

    def append(self, number: int, row: Mapping[str, Any], *, may_repeat: bool = False) -> None:
        """Append one row.

        Args:
            number: That it stands on.
            row: What it holds beside that.
            may_repeat: Whether it may stand on the number of the row before.

        Raises:
            ValueError: The number is not after the last one.
        """
        if self._last is None:
            set_aside(self.path)
            self._start([])
        elif number < self._last + (not may_repeat):
            raise ValueError(
                f"`{self.axis.split('/')[-1]}` must rise, got {number} after {self._last}. A run "
                "that goes back to an earlier one calls `resume` first."
            )
        append_jsonl(self.path, {self.axis: number} | dict(row) | {self.axis: number})
        self._last = number

    def _start(self, rows: list[dict[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) for row in ({_VERSION: SCHEMA_VERSION}, *rows)]
        write_text_atomic(self.path, "\n".join(lines) + "\n")


class MetricsWriter(RowWriter):
    """Append the records of a run to ``metrics.jsonl``; see ``RowWriter``.

    JSON knows no NaN or infinity: such a value is written as null, and its name stands in the row's
    list ``nonfinite``. Iterations only go up. Records of supervised runs stand on their optimiser
    step, and may share it: a validation has a row of its own.
    """

    def write(
        self, stats: IterationStats | StepStats, changes: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Append one record.

        Args:
            stats: What was measured.
            changes: What was changed by it, for readers; not measured, so not read back.

        Raises:
            ValueError: The iteration is not after the last one.
        """
        row = _row(stats) | ({_CHANGES: finite(changes)} if changes else {})
        if isinstance(stats, StepStats):
            self.append(stats.step, row, may_repeat=True)
        else:
            self.append(stats.iteration, row)


def read_metrics(path: str | PathLike[str]) -> list[IterationStats]:
    """Return the records of a run, of a running one too.

    Raises:
        DataError: The file is not one of this schema's version, or a row in it is broken (the last
            one may be).
        OSError: The file cannot be opened.
    """
    return [IterationStats.from_log(_measured(row)) for row in read_rows(path, ITERATION)]


def read_step_metrics(path: str | PathLike[str], record: type[_Stats]) -> list[_Stats]:
    """Return the records of a supervised run, of a running one too.

    Args:
        path: Its ``metrics.jsonl``.
        record: What the rows are, such as ``SFTStats``.

    Raises:
        DataError: As ``read_metrics``.
        OSError: The file cannot be opened.
    """
    return [record.from_log(_measured(row)) for row in read_rows(path, STEP)]


def _row(stats: IterationStats | StepStats) -> dict[str, Any]:
    logged = stats.to_log()
    nonfinite = [name for name, value in logged.items() if not math.isfinite(value)]
    row: dict[str, Any] = logged | dict.fromkeys(nonfinite)
    return row | ({_NONFINITE: nonfinite} if nonfinite else {})


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row; those that were not finite are NaN."""
    numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
    return numbers | dict.fromkeys(row.get(_NONFINITE, []), math.nan)


def read_rows(path: str | PathLike[str], axis: str) -> list[dict[str, Any]]:
    """Return the rows below the header of a file that a ``RowWriter`` wrote.

    Raises:
        DataError: As `RowWriter.resume`.
        OSError: The file cannot be opened.
    """
    bad: list[DataError] = []
    lines = list(read_jsonl(path, on_bad=bad.append))
    last = max((number for number, _ in lines), default=0)
    for error in bad:
        if error.line is None or error.line < last:
            raise error
    if not lines or lines[0][1].get(_VERSION) != SCHEMA_VERSION:
        raise DataError(
            f"does not begin with `{_VERSION}: {SCHEMA_VERSION}`, so it is not a metrics file of "
            "this version. Move it away, or use the version of the package that wrote it.",
            path=path,
            line=1,
        )
    for number, row in lines[1:]:
        if not isinstance(row.get(axis), int):
            raise DataError(f"has no whole number under `{axis}`.", path=path, line=number)
    return [row for _, row in lines[1:]]
