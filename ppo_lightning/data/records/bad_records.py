"""What is wrong with the records of a source, said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ppo_lightning.errors import DataError

log = logging.getLogger(__name__)

OnError = Literal["error", "skip"]

_MOST_LISTED = 10  # bad records spelled out in one error


class FileFault(DataError):
    """A fault of a whole file: what `skip` would leave out is not known."""


class BadRecords:
    """Collects what is wrong with records, for one report of all of them.

    Args:
        name: What the records are read from, for the log.
        on_error: ``error`` makes the report an error, ``skip`` a warning.
    """

    def __init__(self, name: str, on_error: OnError = "error") -> None:
        if on_error not in ("error", "skip"):
            raise ValueError(f"`on_error` must be one of error, skip, got {on_error!r}.")
        self.name = name
        self.on_error = on_error
        self.num_bad = 0
        self.num_good = 0
        self._first: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Note one bad record.

        Raises:
            DataError: It is a fault of the whole file; see `is_of_file`.
        """
        if is_of_file(error):
            raise error
        self.num_bad += 1
        if len(self._first) < _MOST_LISTED:
            self._first.append(error)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Count the record made inside as good, or note the `DataError` raised there."""
        try:
            yield
        except DataError as error:
            self.add(error)
        else:
            self.num_good += 1

    def report(self) -> None:
        """Say what was collected; nothing if every record was usable.

        Raises:
            DataError: ``on_error`` is ``error``; lists the first ten by place.
        """
        if not self.num_bad:
            return
        listed = "\n  ".join(map(str, self._first))
        left = self.num_bad - len(self._first)
        more = f"\n  ... and {left} more" if left else ""
        total = self.num_bad + self.num_good
        summary = f"{self.num_bad} of {total} records cannot be used:\n  {listed}{more}"
        if self.on_error == "error":
            first = self._first[0]
            advice = "Mend them, or leave them out with `on_error: skip`."
            raise DataError(f"{summary}\n{advice}", path=first.path, line=first.line)
        log.warning("%s: skipped, %s", self.name, summary)


def is_of_file(error: DataError) -> bool:
    """Whether an error is a fault of the whole file, and no record's that can be skipped.

    A wrong encoding is one: skipping the lines that show it would keep the others, read by luck.
    """
    return isinstance(error, FileFault) or isinstance(error.__cause__, UnicodeDecodeError)
