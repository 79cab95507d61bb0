"""Which reader a setting means: by what it is, or by the ending of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ppo_lightning.data.records.base import Fields, ListRecords, OnError, RecordSource, StrPath
from ppo_lightning.data.records.files import CsvRecords, JsonlRecords, JsonRecords, TextRecords
from ppo_lightning.data.records.tables import DatasetRecords, ParquetRecords
from ppo_lightning.errors import DataError

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")


def as_records(
    value: RecordSource | StrPath | Sequence[Mapping[str, Any] | str],
    *,
    fields: Fields | None = None,
    on_error: OnError = "error",
    split: str | None = None,
    key: str | None = None,
    delimiter: str | None = None,
    name: str = "list",
    text_name: str = "text",
) -> RecordSource:
    """Return the records that a setting means.

    Nothing is read yet, so the file may appear later.

    Args:
        value: A source, which is returned as it is; a list of objects or strings; a path that ends
            in ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet`` or ``.txt``; a folder that
            ``save_to_disk`` of `datasets` wrote; ``hub:NAME`` or ``hub:NAME:SPLIT``; or a
            ``datasets.Dataset``.
        fields: Our name -> their column; null hides a column.
        on_error: Unusable records are an ``error`` that lists them, or are left out (``skip``).
        split: Part of a dataset that has several.
        key: Where a JSON file that is an object holds the list; None takes its only one.
        delimiter: Between the cells of a CSV file; None is ``,``, or a tab in a TSV file.
        name: What a list is called in messages.
        text_name: Name that strings of a list and lines of a text file get.

    Raises:
        DataError: The path has another ending.
        ValueError: An option does not fit the kind of source.
    """
    if isinstance(value, RecordSource):
        return value
    given = {"split": split, "key": key, "delimiter": delimiter}
    kind = kind_of(value)
    allowed = {"dataset": "split", ".json": "key", ".csv": "delimiter", ".tsv": "delimiter"}
    for option, setting in given.items():
        if setting is not None and allowed.get(kind) != option:
            raise ValueError(f"`{option}` means nothing for {_called(value, kind)}.")
    common: dict[str, Any] = {"fields": fields, "on_error": on_error}
    if kind == "dataset":
        return DatasetRecords(value, split=split, **common)
    if kind == "list":
        entries: Any = value
        return ListRecords(entries, name=name, text_name=text_name, **common)
    path: Any = value
    if kind == ".json":
        return JsonRecords(path, key=key, text_name=text_name, **common)
    if kind in (".csv", ".tsv"):
        between = delimiter or ("\t" if kind == ".tsv" else ",")
        return CsvRecords(path, delimiter=between, **common)
    if kind == ".txt":
        return TextRecords(path, text_name=text_name, **common)
    return ParquetRecords(path, **common) if kind == ".parquet" else JsonlRecords(path, **common)


def kind_of(value: Any) -> str:
    """Return what a setting means: the ending of a file, ``dataset`` or ``list``.

    Raises:
        DataError: The path has another ending.
    """
    if not isinstance(value, str | PathLike):
        return "dataset" if hasattr(value, "column_names") else "list"
    path = fspath(value)
    ending = Path(path).suffix.lower()
    if path.startswith("hub:") or (ending not in ENDINGS and Path(path).is_dir()):
        return "dataset"
    if ending in ENDINGS:
        return ending
    *most, last = (f"`{known}`" for known in ENDINGS)
    raise DataError(
        f"records are read from {', '.join(most)} and {last} files, folders of the package "
        f"datasets and `hub:NAME`, not from `{ending or 'no ending'}`. Rename the file, give a "
        "list, or name a source by its `class_path`.",
        path=path,
    )


def _called(value: Any, kind: str) -> str:
    return "a list" if kind == "list" else f"`{value}`"
