"""``histograms.jsonl``: how scores and lengths of each buffer are distributed, for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.functional import Histogram
from ppo_lightning.metrics.stats import ITERATION
from ppo_lightning.metrics.writer import RowWriter, read_rows

_NAMES = {"raw_score": "rollout/raw_score", "response_length": "rollout/response_length"}


@dataclass(frozen=True, kw_only=True)
class BufferHistograms:
    """Histograms of one buffer, over the responses of all ranks that are in it.

    Args:
        iteration: Its number.
        raw_score: Of the scores before penalties, normalisation and clipping; None where there
            are none.
        response_length: In tokens; bins hold equally many whole numbers.
    """

    iteration: int
    raw_score: Histogram | None = None
    response_length: Histogram | None = None


class HistogramWriter(RowWriter):
    """Append the histograms of a run to ``histograms.jsonl``; see ``RowWriter``.

    A row has the iteration, and by name of what is counted ``edges`` and ``counts``.
    """

    def write(self, found: BufferHistograms) -> None:
        """Append those of one iteration.

        Raises:
            ValueError: The iteration is not after the last one.
        """
        parts = {name: getattr(found, field) for field, name in _NAMES.items()}
        row = {name: asdict(part) for name, part in parts.items() if part is not None}
        self.append(found.iteration, row)


def read_histograms(path: str | PathLike[str]) -> list[BufferHistograms]:
    """Return the histograms of a run, of a running one too.

    Raises:
        DataError: The file is not one of this schema's version, or a row in it is broken (the last
            one may be).
        OSError: The file cannot be opened.
    """
    try:
        return [_read(row) for row in read_rows(path, ITERATION)]
    except (KeyError, TypeError) as error:
        raise DataError(
            "holds a histogram without `edges` and `counts`. Remove its line.", path=path
        ) from error


def _read(row: Mapping[str, Any]) -> BufferHistograms:
    parts = {field: row[name] for field, name in _NAMES.items() if name in row}
    found = {
        field: Histogram(edges=tuple(part["edges"]), counts=tuple(part["counts"]))
        for field, part in parts.items()
    }
    return BufferHistograms(iteration=row[ITERATION], **found)
