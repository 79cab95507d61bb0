"""Records from tables: Parquet files and Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from ppo_lightning.data.records.files import FileRecords, require_file
from ppo_lightning.data.records.plain import plain
from ppo_lightning.errors import DataError, first_line, nearest
from ppo_lightning.rewards.extras import import_extra

__all__ = [
    "DatasetRecords",
    "ParquetRecords",
    "is_dataset_folder",
    "naming_table",
    "open_dataset",
    "open_parquet",
]

_HUB = "hub:"


class ParquetRecords(FileRecords):
    """The rows of a Parquet file, counted from 0, read in small batches. Needs the extra `data`."""

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the rows.

        Raises:
            ConfigError: `pyarrow` is not installed.
            DataError: The file is missing, a folder, damaged or not Parquet, or one of ``fields``
                is not there.
        """
        parquet = open_parquet(self.path)
        self.require_columns(parquet.schema_arrow.names)
        number = 0
        with parquet:
            batches = parquet.iter_batches(batch_size=1024)
            while True:
                with naming_table(self.name):
                    batch = next(batches, None)
                    rows = [] if batch is None else batch.to_pylist()
                if batch is None:
                    return
                for values in rows:
                    yield Record(plain(values), f"{self.name}: row {number}")
                    number += 1


class DatasetRecords(RecordSource):
    """The rows of a Hugging Face dataset, counted from 0. Needs the extra `data`.

    Args:
        dataset: Folder written by ``save_to_disk``, or ``hub:NAME`` or ``hub:NAME:SPLIT``; in
            Python a ``datasets.Dataset`` or ``DatasetDict`` too.
        split: Which part of several.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        split: str | None = None,
        fields: Fields | None = None,
        on_error: OnError = "error",
    ) -> None:
        name = fspath(dataset) if isinstance(dataset, str | Path) else "dataset"
        super().__init__(name, fields=fields, on_error=on_error)
        self.dataset = dataset
        self.split = split

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Read the rows.

        Raises:
            ConfigError: `datasets` is not installed.
            DataError: The dataset or split is not there, or one of ``fields`` is not.
        """
        table = open_dataset(self.dataset, split=self.split)
        self.require_columns(table.column_names)
        for number, values in enumerate(table):
            yield Record(plain(values), f"{self.name}: row {number}")


def open_parquet(path: StrPath) -> Any:
    """Open a Parquet file.

    Raises:
        ConfigError: `pyarrow` is not installed.
        DataError: There is no such file, it is not Parquet, or a column comes twice.
    """
    require_file(path)
    parquet = import_extra(
        "pyarrow.parquet", package="pyarrow", extra="data", needed_by=f"{fspath(path)}"
    )
    arrow = import_extra("pyarrow", package="pyarrow", extra="data", needed_by=f"{fspath(path)}")
    try:
        opened = parquet.ParquetFile(fspath(path))
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"is no Parquet file: {first_line(error)}", path=path) from error
    names = opened.schema_arrow.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        opened.close()
        raise DataError(f"has two columns `{twice}`. Rename one of them.", path=path)
    return opened


@contextmanager
def naming_table(name: str) -> Iterator[None]:
    """Name the table in an error of the library that reads it: a fault of the whole file.

    Raises:
        FileFault: The table is damaged, or text in it is not UTF-8.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise FileFault(f"holds text that is not UTF-8: {first_line(error)}.", path=name) from error
    except (OSError, ValueError) as error:  # those of Arrow are among them
        raise FileFault(f"cannot be read: {first_line(error)}", path=name) from error


def is_dataset_folder(path: StrPath) -> bool:
    """Whether ``save_to_disk`` of `datasets` wrote this folder."""
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def open_dataset(dataset: Any, *, split: str | None = None) -> Any:
    """Open a Hugging Face dataset for random access, from a folder or the hub.

    Args:
        dataset: As for `DatasetRecords`.
        split: Which part of several.

    Returns:
        A ``datasets.Dataset`` that gives plain Python values; its data stay on the disk.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: The dataset or split is not there.
    """
    if not isinstance(dataset, str | Path):
        return _part(dataset, split, "dataset").with_format(None)
    name = fspath(dataset)
    if name.startswith(_HUB):
        return _of_hub(name, split)
    library = _library(name)
    if not is_dataset_folder(name):
        raise DataError(_no_dataset(Path(name)), path=name)
    try:
        found = library.load_from_disk(name)
    except Exception as error:  # a damaged folder shows in many ways
        raise DataError(f"cannot be opened as a dataset: {first_line(error)}", path=name) from error
    return _part(found, split, name).with_format(None)


def _of_hub(address: str, split: str | None) -> Any:
    name, _, named = address.removeprefix(_HUB).partition(":")
    part = named or split
    if not name:
        raise DataError("must have the form `hub:NAME` or `hub:NAME:SPLIT`.", path=address)
    library = _library(address)
    try:
        found = library.load_dataset(name)
    except Exception as error:  # offline, unknown, gated, broken: the library has many errors
        raise DataError(
            f"cannot be loaded from the hub: {first_line(error)}. Without a connection, save it "
            "where there is one (`load_dataset(NAME).save_to_disk(FOLDER)`) and name the folder.",
            path=address,
        ) from error
    return _part(found, part, address).with_format(None)


def _part(found: Any, split: str | None, name: str) -> Any:
    """Return one table of what was loaded, which may be several by split."""
    if hasattr(found, "column_names") and not isinstance(found, dict):
        own = str(found.split) if getattr(found, "split", None) is not None else None
        if split is not None and split != own:
            message = f"has no split `{split}`: it is one table. Leave `split` out."
            raise DataError(message, path=name)
        return found
    splits = list(found)
    if split is None and len(splits) == 1:
        return found[splits[0]]
    listed = ", ".join(f"`{entry}`" for entry in splits)
    if split is None:
        raise DataError(f"has the splits {listed}: choose one with `split`.", path=name)
    if split not in splits:
        meant = nearest(split, splits)
        hint = f" Did you mean `{meant}`?" if meant else ""
        raise DataError(f"has no split `{split}`, only {listed}.{hint}", path=name)
    return found[split]


def _no_dataset(folder: Path) -> str:
    if not folder.exists():
        return (
            f"no such file or folder; relative paths start at the working directory, {Path.cwd()}."
        )
    return (
        "is a folder, but not one that `save_to_disk` of the package datasets wrote (it has no "
        "`state.json` or `dataset_dict.json`). Name a file in it, or save the dataset so."
    )


def _library(needed_by: str) -> Any:
    return import_extra("datasets", package="datasets", extra="data", needed_by=needed_by)
