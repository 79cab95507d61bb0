"""Random access to the records of a file or dataset that stays on the disk."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import fspath
from pathlib import Path
from typing import Any, BinaryIO

from ppo_lightning.data.records.bad_records import FileFault, is_of_file
from ppo_lightning.data.records.base import Fields, Record, StrPath, renamed, require_columns
from ppo_lightning.data.records.files import CSV_FIELD_LIMIT, csv_fault, csv_header, csv_values
from ppo_lightning.data.records.formats import ENDINGS, kind_of
from ppo_lightning.data.records.plain import plain
from ppo_lightning.data.records.tables import naming_table, open_dataset, open_parquet
from ppo_lightning.data.streams.offsets import LineIndex, index_lines
from ppo_lightning.errors import DataError, first_line
from ppo_lightning.io import decode, parse_record
from ppo_lightning.rewards.extras import import_extra

__all__ = ["Rows", "open_rows"]


class Rows(ABC):
    """Records by their number.

    Args:
        name: What they are read from, for messages.
        fields: Our name -> their column; null hides one.
    """

    def __init__(self, name: str, fields: Fields) -> None:
        self.name = name
        self.fields = fields

    @abstractmethod
    def __len__(self) -> int:
        """Records that there are."""

    def read(self, numbers: Iterable[int]) -> Iterator[Record | DataError]:
        """Read some records, under our names; what is wrong with one comes in its place.

        Raises:
            DataError: The file has changed since it was opened.
        """
        for found in self._read(numbers):
            if isinstance(found, DataError):
                yield found
                continue
            try:
                yield renamed(found, self.fields)
            except DataError as error:
                yield error

    @abstractmethod
    def _read(self, numbers: Iterable[int]) -> Iterator[Record | DataError]:
        """Read some records as they stand."""


class LineRows(Rows):
    """The lines of a JSONL or text file, or the rows of a CSV file.

    Args:
        path: The file.
        kind: Its ending.
        fields: See `Rows`.
        delimiter: Between the cells of a CSV file.
        cache: Keep the index beside the file.
    """

    def __init__(
        self, path: StrPath, kind: str, fields: Fields, *, delimiter: str, cache: bool
    ) -> None:
        super().__init__(fspath(path), fields)
        self.path = path
        self.kind = kind
        self.delimiter = delimiter
        self.header: list[str] = []
        self.index: LineIndex = index_lines(path, quoted=kind in (".csv", ".tsv"), cache=cache)
        if kind in (".csv", ".tsv"):
            self._take_header()
        if not len(self.index):
            raise DataError("holds no record.", path=path)

    def __len__(self) -> int:
        return len(self.index)

    def _take_header(self) -> None:
        if not len(self.index):
            raise DataError("is empty.", path=self.path)
        with open(self.path, "rb") as file:
            cells = self._cells(file, 0)
        self.header = csv_header(cells, self.path, self.index.line(0))
        require_columns(self.header, self.fields, self.name)
        self.index = self.index.without_first()

    def _read(self, numbers: Iterable[int]) -> Iterator[Record | DataError]:
        self.index.check(self.path)
        with open(self.path, "rb") as file:
            for number in numbers:
                yield self._record(file, number)

    def _record(self, file: BinaryIO, number: int) -> Record | DataError:
        try:
            values = self._values(file, number)
        except DataError as error:
            if is_of_file(error):
                raise
            return error
        return Record(values, f"{self.name}:{self.index.line(number)}")

    def _values(self, file: BinaryIO, number: int) -> dict[str, Any]:
        line = self.index.line(number)
        if self.kind == ".jsonl":
            raw, start = self._raw(file, number)
            values = parse_record(raw.split(b"\n", 1)[0], self.path, line, offset=start)
            assert values is not None  # the index has no blank lines
            return values
        if self.kind == ".txt":
            key = self.fields.get("prompt") or "prompt"
            return {key: self._text(file, number).split("\n", 1)[0].removesuffix("\r")}
        cells = self._cells(file, number)
        try:
            return dict(csv_values(cells, self.header))
        except DataError as error:
            raise DataError(error.args[0], path=self.path, line=line) from error

    def _cells(self, file: BinaryIO, number: int) -> list[str]:
        csv.field_size_limit(CSV_FIELD_LIMIT)
        line = self.index.line(number)
        lines = io.StringIO(self._text(file, number), newline="\n")
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        try:
            cells = next(reader, [])
        except csv.Error as error:
            last = line - 1 + reader.line_num
            raise csv_fault(error, self.path, line, last=last) from error
        # The index takes every quote for one that opens or closes a cell.
        if lines.read().strip():
            raise FileFault(
                'a `"` stands inside of a cell without quotes, so that records cannot be told '
                "apart without reading all before them. Put the cell into quotes and write the "
                '`"` as two, or read the file whole with `FilePrompts`.',
                path=self.path,
                line=line,
            )
        return cells

    def _text(self, file: BinaryIO, number: int) -> str:
        raw, start = self._raw(file, number)
        return decode(raw, self.path, first_line=self.index.line(number), offset=start)

    def _raw(self, file: BinaryIO, number: int) -> tuple[bytes, int]:
        start, end = self.index.stretch(number)
        file.seek(start)
        return file.read(end - start), start


class DatasetRows(Rows):
    """The rows of a Hugging Face dataset, whose data are mapped into memory from the disk.

    Args:
        table: A ``datasets.Dataset``.
        name: See `Rows`.
        fields: See `Rows`.
    """

    def __init__(self, table: Any, name: str, fields: Fields) -> None:
        super().__init__(name, fields)
        self.table = table
        require_columns(table.column_names, fields, name)
        if not len(table):
            raise DataError("holds no record.", path=name)

    def __len__(self) -> int:
        return len(self.table)

    def _read(self, numbers: Iterable[int]) -> Iterator[Record | DataError]:
        for number in numbers:
            with naming_table(self.name):
                values = self.table[int(number)]
            yield Record(plain(values), f"{self.name}: row {number}")


def open_rows(
    path: StrPath,
    *,
    fields: Fields | None = None,
    split: str | None = None,
    delimiter: str | None = None,
    cache: bool = False,
) -> Rows:
    """Open a file or dataset for random access.

    Args:
        path: A ``.jsonl``, ``.txt``, ``.csv``, ``.tsv`` or ``.parquet`` file, a folder that
            ``save_to_disk`` of `datasets` wrote, or ``hub:NAME`` or ``hub:NAME:SPLIT``. `datasets`
            converts a Parquet file into its own form once, in its cache folder.
        fields: Our name -> their column; null hides one.
        split: Part of a dataset that has several.
        delimiter: Between the cells of a CSV file; None is ``,``, or a tab in a TSV file.
        cache: Keep the index of a text file beside it.

    Raises:
        ConfigError: A package that is needed is not installed.
        DataError: There is no such file or dataset, it has no records, or cannot be streamed.
    """
    kind = kind_of(path)
    fields = dict(fields or {})
    if kind == ".json":
        others = ", ".join(f"`{ending}`" for ending in ENDINGS if ending != ".json")
        raise DataError(
            f"a JSON file is one value and cannot be streamed. Write it as JSONL, one object a "
            f"line (streamed are {others} and datasets), or read it whole with `FilePrompts`.",
            path=path,
        )
    if kind == "dataset":
        return DatasetRows(open_dataset(path, split=split), fspath(path), fields)
    if kind == ".parquet":
        return DatasetRows(_mapped(path), fspath(path), fields)
    between = delimiter or ("\t" if kind == ".tsv" else ",")
    return LineRows(path, kind, fields, delimiter=between, cache=cache)


def _mapped(path: StrPath) -> Any:
    """Return a Parquet file as a dataset that is mapped into memory."""
    name = fspath(path)
    with open_parquet(path) as parquet:  # says better what is wrong with the file
        if not parquet.metadata.num_rows:
            raise DataError("holds no record.", path=path)
    library = import_extra("datasets", package="datasets", extra="data", needed_by=name)
    with _without_bars(library):
        try:
            return library.Dataset.from_parquet(str(Path(name).absolute()))
        except Exception as error:  # a damaged file, a type that it lacks, no room for its copy
            said = f"cannot be streamed: {first_line(error.__cause__ or error)}"
            advice = "Mend the file, or read it whole with `FilePrompts`."
            raise DataError(f"{said.rstrip('.')}. {advice}", path=path) from error


@contextmanager
def _without_bars(library: Any) -> Iterator[None]:
    off = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not off:
            library.enable_progress_bars()
