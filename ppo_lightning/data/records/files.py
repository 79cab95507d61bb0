"""Records from text files: JSONL, JSON, CSV, TSV and plain lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from os import fspath
from pathlib import Path
from typing import Any

from ppo_lightning.data.records.bad_records import FileFault
from ppo_lightning.data.records.base import (
    BadRecords,
    Fields,
    OnError,
    Record,
    RecordSource,
    StrPath,
)
from ppo_lightning.errors import DataError
from ppo_lightning.io import read_json, read_jsonl, read_text

__all__ = [
    "CSV_FIELD_LIMIT",
    "CsvRecords",
    "FileRecords",
    "JsonRecords",
    "JsonlRecords",
    "TextRecords",
    "csv_fault",
    "csv_header",
    "csv_values",
    "require_file",
]

CSV_FIELD_LIMIT = 1 << 27
"""Characters of one CSV field: Python's own limit of 131,072 is below some chats."""


class FileRecords(RecordSource):
    """Records of one file.

    Args:
        path: The file, in UTF-8, with or without a byte-order mark.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
    """

    def __init__(
        self, path: StrPath, *, fields: Fields | None = None, on_error: OnError = "error"
    ) -> None:
        super().__init__(fspath(path), fields=fields, on_error=on_error)
        self.path = path


class JsonlRecords(FileRecords):
    """One JSON object a line; blank lines are skipped."""

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the objects.

        Raises:
            DataError: The file is missing, a folder or not UTF-8.
        """
        require_file(self.path)
        for number, values in read_jsonl(self.path, on_bad=bad.add):
            yield Record(values, f"{self.name}:{number}")


class TextRecords(FileRecords):
    r"""One text a line, under ``text_name``; lines end at ``\n`` only, blank ones are skipped.

    Args:
        path: See `FileRecords`.
        text_name: Name that the lines get.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        text_name: str = "text",
        fields: Fields | None = None,
        on_error: OnError = "error",
    ) -> None:
        super().__init__(path, fields=fields, on_error=on_error)
        self.text_name = text_name

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the lines.

        Raises:
            DataError: The file is missing, a folder or not UTF-8.
        """
        require_file(self.path)
        key = self.fields.get(self.text_name) or self.text_name
        # Not `splitlines`: it also cuts at U+2028 and other characters that texts may hold.
        for number, line in enumerate(read_text(self.path).split("\n"), start=1):
            if line.strip():
                yield Record({key: line.removesuffix("\r")}, f"{self.name}:{number}")


class JsonRecords(FileRecords):
    """A JSON file with a list of objects (or strings), or an object that holds the list.

    Args:
        path: See `FileRecords`.
        key: Where an object holds the list; None takes its only one.
        text_name: Name that strings get.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        key: str | None = None,
        text_name: str = "text",
        fields: Fields | None = None,
        on_error: OnError = "error",
    ) -> None:
        super().__init__(path, fields=fields, on_error=on_error)
        self.key = key
        self.text_name = text_name

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the objects.

        Raises:
            DataError: The file is missing, a folder, not UTF-8, not JSON, or holds no such list.
        """
        require_file(self.path)
        for number, values in enumerate(self._list()):
            origin = f"{self.name}[{number}]"
            if isinstance(values, dict):
                yield Record(values, origin)
            elif isinstance(values, str):
                yield Record({self.fields.get(self.text_name) or self.text_name: values}, origin)
            else:
                message = f"must be an object {{...}} or a string, got {values!r:.60}."
                bad.add(DataError(message, path=origin))

    def _list(self) -> list[Any]:
        try:
            value = read_json(self.path)
        except DataError as error:
            if "Extra data" in error.args[0]:
                hint = " If it has one object a line, give it the ending `.jsonl`."
                raise DataError(
                    error.args[0] + hint, path=self.path, line=error.line, column=error.column
                ) from error
            raise
        if isinstance(value, dict):
            lists = [name for name, entry in value.items() if isinstance(entry, list)]
            key = lists[0] if self.key is None and len(lists) == 1 else self.key
            if key is None or not isinstance(value.get(key), list):
                raise DataError(_no_list(key, lists, value), path=self.path)
            value = value[key]
        if not isinstance(value, list):
            raise DataError(
                f"must hold a list of objects, or an object with such a list, got {value!r:.60}.",
                path=self.path,
            )
        return value


class CsvRecords(FileRecords):
    """A table of text: its first line names the columns.

    Values are text; an empty cell is null. Cells may be quoted with ``"`` and then hold line ends.

    Args:
        path: See `FileRecords`.
        delimiter: Between cells.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        delimiter: str = ",",
        fields: Fields | None = None,
        on_error: OnError = "error",
    ) -> None:
        super().__init__(path, fields=fields, on_error=on_error)
        if len(delimiter) != 1:
            raise ValueError(f"`delimiter` must be one character, got {delimiter!r}.")
        self.delimiter = delimiter

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the lines below the header.

        Raises:
            DataError: The file is missing, a folder, empty or not UTF-8, a column comes twice, one
                of ``fields`` is not there, or a quote is never closed.
        """
        require_file(self.path)
        header: list[str] | None = None
        for line, cells in self._cells(bad):
            if header is None:
                header = csv_header(cells, self.path, line)
                self.require_columns(header)
                continue
            try:
                values = csv_values(cells, header)
            except DataError as error:
                bad.add(DataError(error.args[0], path=self.path, line=line))
            else:
                yield Record(values, f"{self.name}:{line}")
        if header is None:
            raise DataError("is empty.", path=self.path)

    def _cells(self, bad: BadRecords) -> Iterator[tuple[int, list[str]]]:
        """Read the cells of each line that is not blank, with the number of its first line."""
        csv.field_size_limit(CSV_FIELD_LIMIT)
        lines = io.StringIO(read_text(self.path), newline="\n")
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        is_header = True
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fault = csv_fault(error, self.path, line, last=reader.line_num)
                if is_header:
                    raise fault from error
                bad.add(fault)
                continue
            if not is_blank(cells):
                is_header = False
                yield line, cells


def csv_header(cells: Sequence[str], path: StrPath, line: int) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: A name comes twice.
    """
    names = [cell.strip() for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        message = f"the header has two columns `{twice}`. Rename one of them."
        raise DataError(message, path=path, line=line)
    return names


def csv_values(cells: Sequence[str], header: Sequence[str]) -> dict[str, str | None]:
    """Return the values of a line by column.

    Raises:
        DataError: It has more or fewer cells than the header.
    """
    if len(cells) != len(header):
        raise DataError(
            f"has {len(cells)} cells, but the header names {len(header)} columns. Quote cells that "
            "hold the delimiter or a line end."
        )
    return {name: cell or None for name, cell in zip(header, cells, strict=True)}


def csv_fault(error: csv.Error, path: StrPath, line: int, *, last: int) -> DataError:
    """Say what is wrong with a line of a table.

    Args:
        error: As `csv` says it.
        path: The file.
        line: Number of the line.
        last: Number of the line that was reached.
    """
    if "unexpected end of data" not in str(error):
        return DataError(f"is not valid CSV: {error}.", path=path, line=line)
    message = (
        f"is not valid CSV: a quote is opened here and never closed, so that all up to line {last} "
        'is one cell. Close it; a `"` that belongs to a text is written as two, in a quoted cell.'
    )
    return FileFault(message, path=path, line=line)


def is_blank(cells: Sequence[str]) -> bool:
    """Whether a line of a table has nothing in it."""
    return len(cells) <= 1 and not "".join(cells).strip()


def require_file(path: StrPath) -> None:
    """Check that there is such a file.

    Raises:
        DataError: There is not, or it is a folder.
    """
    if Path(path).is_dir():
        raise DataError("is a folder; name the file.", path=path)
    if not Path(path).is_file():
        message = f"no such file; relative paths start at the working directory, {Path.cwd()}."
        raise DataError(message, path=path)


def _no_list(key: str | None, lists: Sequence[str], value: Mapping[str, Any]) -> str:
    if key is not None:
        found = ", ".join(f"`{name}`" for name in value) or "none"
        return f"has no list under `{key}`; keys found: {found}."
    if not lists:
        return "must hold a list of objects, but it is an object without one."
    named = ", ".join(f"`{name}`" for name in lists)
    return f"is an object with several lists ({named}). Name the one of objects with `key`."
