"""TensorBoard's event files, read without TensorFlow or torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.reporting.tables import Row, Table

STEP = "step"
_FLOAT, _DOUBLE = 1, 2  # types of TensorFlow's tensors
_FRAME = 16  # bytes around a record: its length and two checksums


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, oldest first; their names begin with the time."""
    return sorted(folder.glob("*tfevents*"))


def read_events(paths: Sequence[Path]) -> Table:
    """Read the scalars of event files, those of one process after the other.

    Raises:
        DataError: There are no scalars in them.
    """
    rows = [row for path in paths for row in _rows(path)]
    notes = [f"{path.name} ends in a record that is cut off" for path in paths if _is_cut(path)]
    if not rows:
        raise DataError("holds no numbers of TensorBoard.", path=paths[0])
    return Table(kind="TensorBoard", rows=rows, notes=notes)


def _rows(path: Path) -> list[Row]:
    """Return one row for each step."""
    steps: dict[int, dict[str, float]] = {}
    for step, tag, value in _scalars(path):
        steps.setdefault(step, {})[tag] = value
    return [Row(numbers={STEP: float(step), **tags}) for step, tags in sorted(steps.items())]


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
