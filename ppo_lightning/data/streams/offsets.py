"""Where the records of a file begin: random access to files that are larger than memory."""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ppo_lightning.data.records.base import StrPath
from ppo_lightning.data.records.files import require_file
from ppo_lightning.errors import DataError
from ppo_lightning.io import open_atomic

__all__ = ["LineIndex", "index_lines"]

log = logging.getLogger(__name__)

Offsets = NDArray[np.int64]

_CHUNK = 1 << 22
_NEWLINE, _QUOTE = b"\n"[0], b'"'[0]
# First bytes that white space can have in UTF-8, the byte-order mark among it.
_SPACES = np.frombuffer(b" \t\r\n\x0b\x0c\x1c\x1d\x1e\x1f\xc2\xe1\xe2\xe3\xef", np.uint8)
_LOOKED_AT = 64  # bytes of a line that may be blank
_CACHE_ENDING = ".index.npz"


@dataclass(frozen=True)
class LineIndex:
    """Where each record of a file begins; blank lines are left out.

    Args:
        starts: Byte offsets. ``[N]`` int64.
        lines: Numbers of the lines, from 1; None where each is one above the one before.
        first_line: Number of the first record's line.
        stamp: Size of the file in bytes and time of its last change, in nanoseconds.
    """

    starts: Offsets
    lines: Offsets | None
    first_line: int
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return len(self.starts)

    def line(self, number: int) -> int:
        """Return the number of the line that a record begins on."""
        return self.first_line + number if self.lines is None else int(self.lines[number])

    def stretch(self, number: int) -> tuple[int, int]:
        """Return where a record begins and where it must have ended, in bytes."""
        last = number + 1 == len(self)
        end = self.stamp[0] if last else int(self.starts[number + 1])
        return int(self.starts[number]), end

    def without_first(self) -> LineIndex:
        """Leave the first record out: the header of a table."""
        lines = None if self.lines is None else self.lines[1:]
        first = self.line(1) if len(self) > 1 else self.first_line
        return LineIndex(self.starts[1:], lines, first, self.stamp)

    def check(self, path: StrPath) -> None:
        """Make sure that the file is still the one that was indexed.

        Raises:
            DataError: It is gone, or its size or time has changed.
        """
        require_file(path)
        if stamp_of(path) != self.stamp:
            raise DataError(
                "has changed since the run began to read it, so its records are no longer where "
                "they were. Start again, with a file that stays as it is.",
                path=path,
            )


def index_lines(path: StrPath, *, quoted: bool = False, cache: bool = False) -> LineIndex:
    r"""Find the records of a file in one pass. Lines end at ``\n`` only.

    Memory: 8 bytes a record, and 16 if lines are blank or records have several.

    Args:
        path: The file.
        quoted: A line end between ``"`` is part of the record, as in a CSV file.
        cache: Keep the index beside the file, as ``NAME.index.npz``, and take it from there if the
            file has not changed.

    Raises:
        DataError: The file is missing or a folder.
    """
    require_file(path)
    beside = Path(fspath(path) + _CACHE_ENDING)
    if cache and (found := _load(beside, stamp_of(path), quoted)) is not None:
        return found
    index = _scan(path, quoted)
    if cache:
        _save(beside, index, quoted)
    return index


def stamp_of(path: StrPath) -> tuple[int, int]:
    """Return a file's size in bytes and the time of its last change, in nanoseconds."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _scan(path: StrPath, quoted: bool) -> LineIndex:
    stamp = stamp_of(path)
    parts = list(_beginnings(path, quoted))
    if not parts:
        return LineIndex(np.zeros(0, np.int64), None, 1, stamp)
    starts, firsts = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
    lines = np.concatenate([part[2] for part in parts]) if quoted else None
    del parts
    # A line end at the end of the file begins no record.
    kept = (starts < stamp[0]) & ~_blank(path, starts, firsts)
    if lines is None:
        numbers = np.flatnonzero(kept)
        first = int(numbers[0]) + 1 if len(numbers) else 1
        regular = not len(numbers) or int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
        return LineIndex(starts[kept], None if regular else numbers + 1, first, stamp)
    lines = lines[kept]
    return LineIndex(starts[kept], lines, int(lines[0]) if len(lines) else 1, stamp)


def _beginnings(path: StrPath, quoted: bool) -> Iterator[tuple[Offsets, Any, Offsets]]:
    """Yield offset, first byte and (where lines may be quoted) line number, part by part."""
    start, line, is_open = np.zeros(1, np.int64), np.ones(1, np.int64), 0
    offset = num_lines = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            data = np.frombuffer(chunk, np.uint8)
            ends = np.flatnonzero(data == _NEWLINE)
            lines = num_lines + 2 + np.arange(len(ends) if quoted else 0)
            num_lines += len(ends)
            if quoted:
                quotes = np.flatnonzero(data == _QUOTE)
                outside = (np.searchsorted(quotes, ends) + is_open) % 2 == 0
                ends, lines = ends[outside], lines[outside]
                is_open = (is_open + len(quotes)) % 2
            starts = np.concatenate([start, offset + ends + 1])
            lines = np.concatenate([line, lines])
            inside = starts < offset + len(data)  # the last may be at the head of the next part
            here = int(inside.sum())
            yield starts[:here], data[starts[:here] - offset], lines[:here]
            start, line = starts[here:], lines[here:]
            offset += len(data)


def _blank(path: StrPath, starts: Offsets, firsts: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which lines are blank. ``[N]`` bool."""
    blank = firsts == _NEWLINE
    with open(path, "rb") as file:
        for number in np.flatnonzero(np.isin(firsts, _SPACES) & ~blank):
            blank[number] = _is_blank(file, int(starts[number]))
    return np.asarray(blank)


def _is_blank(file: BinaryIO, start: int) -> bool:
    file.seek(start)
    line = file.readline(_LOOKED_AT)
    if line.decode("utf-8", errors="ignore").lstrip("\ufeff").strip():
        return False
    line += b"" if line.endswith(b"\n") else file.readline()
    text = line.decode("utf-8", errors="replace")
    return not (text if start else text.removeprefix("\ufeff")).strip()


def _save(beside: Path, index: LineIndex, quoted: bool) -> None:
    lines = np.zeros(0, np.int64) if index.lines is None else index.lines
    stamp = np.array([*index.stamp, index.first_line, quoted, index.lines is None], np.int64)
    try:
        with open_atomic(beside) as file:
            np.savez(file, starts=index.starts, lines=lines, stamp=stamp)
    except OSError as error:
        log.warning("%s: the index is not kept: %s", beside, error)


def _load(beside: Path, stamp: tuple[int, int], quoted: bool) -> LineIndex | None:
    """Return the index kept beside a file; None if there is none of this very file."""
    try:
        # Opened here: NumPy would leave a damaged file open.
        with open(beside, "rb") as file, np.load(file, allow_pickle=False) as kept:
            size, changed, first, was_quoted, regular = kept["stamp"].tolist()
            if (size, changed) != stamp or bool(was_quoted) != quoted:
                return None
            lines = None if regular else kept["lines"]
            return LineIndex(kept["starts"], lines, first, stamp)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        log.warning("%s: not a usable index, made anew: %s", beside, error)
        return None
