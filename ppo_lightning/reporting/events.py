"""TensorBoard's event files, read without TensorFlow or torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.reporting.tables import Row, Table

STEP = "step"
_AXES = {STEP, "epoch", "hp_metric"}  # names that any writer of a run may use
_FLOAT, _DOUBLE = 1, 2  # types of TensorFlow's tensors
_FRAME = 16  # bytes around a record: its length and two checksums


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, oldest first; their names begin with the time."""
    return sorted(folder.glob("*tfevents*"))


def read_events(paths: Sequence[Path]) -> Table:
    """Read the scalars of event files: those of one writer one after the other.

    Files that share names are of one writer, and one that begins its steps again is of a resumed
    run. Other writers of the same run, as for validation, stand beside it.

    Args:
        paths: The oldest first.

    Raises:
        DataError: There are no scalars in them.
    """
    writers: list[tuple[set[str], list[Row]]] = []
    for path in paths:
        rows = _rows(path)
        names = {name for row in rows for name in row.numbers} - _AXES
        own = next((writer for writer in writers if writer[0] & names), None)
        if own is None:
            writers.append((names, rows))
        else:
            own[0].update(names)
            own[1].extend(rows)
    notes = [f"{path.name} ends in a record that is cut off" for path in paths if _is_cut(path)]
    found = [rows for _, rows in writers if rows]
    if not found:
        raise DataError("holds no numbers of TensorBoard.", path=paths[0])
    return Table(kind="TensorBoard", rows=_beside(found), notes=notes)


def _rows(path: Path) -> list[Row]:
    """Return one row for each step."""
    steps: dict[int, dict[str, float]] = {}
    for step, tag, value in _scalars(path):
        steps.setdefault(step, {})[tag] = value
    return [Row(numbers={STEP: float(step), **tags}) for step, tags in sorted(steps.items())]


def _beside(writers: Sequence[Sequence[Row]]) -> Sequence[Row]:
    """Put rows of the same step together."""
    if len(writers) == 1:
        return writers[0]
    steps: dict[float, dict[str, float]] = {}
    for rows in writers:
        for row in _latest(rows):
            steps.setdefault(row.numbers[STEP], {}).update(row.numbers)
    return [Row(numbers=steps[step]) for step in sorted(steps)]


def _latest(rows: Sequence[Row]) -> list[Row]:
    """Leave out what a resumed run has left behind."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1].numbers[STEP] >= row.numbers[STEP]:
            kept.pop()
        kept.append(row)
    return kept


def _is_cut(path: Path) -> bool:
    """Whether the last record is not whole; TensorBoard's reader leaves it out without a word."""
    size, place = path.stat().st_size, 0
    with open(path, "rb") as file:
        while place < size:
            file.seek(place)
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            place += _FRAME + length
    return place > size


def _scalars(path: Path) -> Iterator[tuple[int, str, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                yield int(event.step), value.tag, number


def _scalar(value: Any) -> float | None:
    """Return the number of a scalar; None of texts, histograms and pictures."""
    if value.metadata.plugin_data.plugin_name not in ("scalars", ""):
        return None
    tensor = value.tensor
    if tensor.dtype not in (_FLOAT, _DOUBLE) or tensor.tensor_shape.dim:
        return None
    stored = tensor.float_val if tensor.dtype == _FLOAT else tensor.double_val
    if len(stored) == 1:
        return float(stored[0])
    return _packed(tensor)


def _packed(tensor: Any) -> float | None:
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(tensor)
    return float(array) if array.size == 1 else None
