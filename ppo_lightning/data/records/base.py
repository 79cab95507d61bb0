"""Records of any source, and one report of all that are unusable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeVar

from ppo_lightning.data.records.bad_records import BadRecords, OnError
from ppo_lightning.data.records.plain import is_null, null_mark, plain
from ppo_lightning.errors import DataError, nearest

__all__ = [
    "BadRecords",
    "Fields",
    "ListRecords",
    "OnError",
    "Record",
    "RecordSource",
    "StrPath",
    "read_examples",
]

StrPath = str | PathLike[str]
Fields = Mapping[str, str | None]
Example = TypeVar("Example")


@dataclass(frozen=True)
class Record:
    """One record as it was read.

    Args:
        values: Keys and values, after the mapping of fields.
        origin: Where it stands: ``file.jsonl:17``, ``table.parquet: row 17``, ``list[3]``.
    """

    values: Mapping[str, Any]
    origin: str = ""

    def error(self, message: str) -> DataError:
        """Return an error that names this record's place."""
        return DataError(message, path=self.origin or None)

    def required(self, name: str) -> Any:
        """Return the value under a name.

        Raises:
            DataError: There is none, or it is null; names the keys found and the setting.
        """
        value = self.values.get(name)
        if is_null(value):
            raise self.error(self.missing([name]))
        return value

    def missing(self, names: Sequence[str], *, setting: str = "fields") -> str:
        """Say that none of these names has a value, what there is, and which setting mends it.

        Args:
            names: What was looked for.
            setting: Name of the setting that maps fields.
        """
        others = [key for key in self.values if key not in names]
        found = [f"`{key}`{null_mark(value)}" for key, value in self.values.items()]
        meant = next((near for name in names if (near := nearest(name, others))), None)
        texts = [key for key in others if isinstance(self.values[key], str)]
        guess = meant or (texts[0] if len(texts) == 1 else "their_name")
        return (
            f"has no {' or '.join(f'`{name}`' for name in names)}; "
            f"keys found: {', '.join(found) or 'none'}. "
            f"{f'Did you mean `{meant}`? ' if meant else ''}"
            f"Name the key that holds it, such as `{setting}: {{{names[0]}: {guess}}}`."
        )


class RecordSource(ABC):
    """Something that records can be read from; see ``as_records`` for the ones there are.

    Args:
        name: What it is called in messages: a path, an id.
        fields: Our name -> their column. A column with another name gets ours; null hides one.
        on_error: Unusable records are an ``error`` that lists them, or are left out (``skip``).

    Attributes:
        num_skipped: Records that the last complete reading left out.
    """

    num_skipped: int = 0

    def __init__(
        self, name: str, *, fields: Fields | None = None, on_error: OnError = "error"
    ) -> None:
        self.name = name
        self.fields = dict(fields or {})
        self.on_error: OnError = on_error
        BadRecords(name, on_error)  # checks the choice while the setting is at hand

    @abstractmethod
    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the records as they stand, in the same order at every call.

        Args:
            bad: Takes the errors of those that cannot be read.
        """

    def require_columns(self, columns: Sequence[str]) -> None:
        """Check once for a whole table that it has the columns of ``fields``.

        Raises:
            DataError: It lacks one; names it, what there is, and what may be meant.
        """
        require_columns(columns, self.fields, self.name)

    def records(self, bad: BadRecords | None = None) -> Iterator[Record]:
        """Read the records, under our names.

        Args:
            bad: Takes the errors of bad records, for the caller to report. Without it they are
                reported at the end of the reading.

        Raises:
            DataError: The source cannot be read at all, or has bad records and no collector.
        """
        collector = BadRecords(self.name, self.on_error) if bad is None else bad
        for row in self.rows(collector):
            try:
                record = renamed(row, self.fields)
            except DataError as error:
                collector.add(error)
                continue
            if bad is None:
                collector.num_good += 1
            yield record
        if bad is None:
            self.num_skipped = collector.num_bad
            collector.report()


class ListRecords(RecordSource):
    """Records written in the config or made by a program.

    Args:
        entries: Objects; or strings, which stand under ``text_name``.
        name: What the list is called in messages.
        text_name: Name that strings get.
        fields: See ``RecordSource``; strings have their name already.
        on_error: See ``RecordSource``.
    """

    def __init__(
        self,
        entries: Sequence[Mapping[str, Any] | str],
        *,
        name: str = "list",
        text_name: str = "text",
        fields: Fields | None = None,
        on_error: OnError = "error",
    ) -> None:
        super().__init__(name, fields=fields, on_error=on_error)
        self.entries = list(entries)
        self.text_name = text_name

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the entries.

        Raises:
            DataError: The list is empty.
        """
        if not self.entries:
            raise DataError("the list is empty.", path=self.name)
        for number, entry in enumerate(self.entries):
            origin = f"{self.name}[{number}]"
            if isinstance(entry, str):
                yield Record({self.fields.get(self.text_name) or self.text_name: entry}, origin)
            elif isinstance(entry, Mapping):
                yield Record(plain(entry), origin)
            else:
                message = f"must be a string or an object, got {entry!r:.60}."
                bad.add(DataError(message, path=origin))


def read_examples(source: RecordSource, make: Callable[[Record], Example]) -> list[Example]:
    """Make an example of every record; all that are unusable come in one report.

    ``source.num_skipped`` is then the number left out.

    Args:
        source: The records.
        make: Raises `DataError` for a record it cannot use (`Record.error` names the place).

    Raises:
        DataError: Records are unusable and ``on_error`` is ``error``, or no example is left.
    """
    bad = BadRecords(source.name, source.on_error)
    examples: list[Example] = []
    for record in source.records(bad):
        with bad.collecting():
            examples.append(make(record))
    source.num_skipped = bad.num_bad
    bad.report()
    if not examples:
        raise DataError("holds no usable record.", path=source.name)
    return examples


def renamed(record: Record, fields: Fields) -> Record:
    """Give columns our names: ``{"prompt": "question"}`` reads ``question`` as ``prompt``.

    Raises:
        DataError: A column is not there.
    """
    if not fields:
        return record
    values = record.values
    for ours, theirs in fields.items():
        if theirs is not None and theirs not in values:
            raise record.error(_no_column(ours, theirs, values))
    taken = {*fields, *fields.values()}
    rest = {key: value for key, value in values.items() if key not in taken}
    named = {ours: values[theirs] for ours, theirs in fields.items() if theirs is not None}
    return Record({**named, **rest}, record.origin)


def require_columns(columns: Sequence[str], fields: Fields, name: str) -> None:
    """Check that a table has the columns of ``fields``; see `RecordSource.require_columns`."""
    for ours, theirs in fields.items():
        if theirs is not None and theirs not in columns:
            raise DataError(_no_column(ours, theirs, columns), path=name)


def _no_column(ours: str, theirs: str, columns: Iterable[str]) -> str:
    columns = list(columns)
    meant = nearest(theirs, columns)
    found = ", ".join(f"`{key}`" for key in columns) or "none"
    return (
        f"has no `{theirs}`, which `fields` names as `{ours}`; keys found: {found}."
        f"{f' Did you mean `{meant}`?' if meant else ''}"
    )
