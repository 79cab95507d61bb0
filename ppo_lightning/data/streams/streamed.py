"""Prompts of files that are larger than memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ppo_lightning.data.prompts.feeds import Keys, Prompt, PromptFeed
from ppo_lightning.data.prompts.identity import prompt_key
from ppo_lightning.data.prompts.raw import LastAnswer, RawPrompt, checked_last_answer, prompt_of
from ppo_lightning.data.prompts.reader import PromptReader
from ppo_lightning.data.prompts.sources import PromptSource
from ppo_lightning.data.records.bad_records import BadRecords, OnError
from ppo_lightning.data.records.base import Record, StrPath
from ppo_lightning.data.streams.rows import Rows, open_rows
from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.functional.random import combine_keys, permuted

__all__ = ["StreamFeed", "StreamedPrompts", "streamed_order"]

log = logging.getLogger(__name__)

Validate = Literal["all", "lazy"]

_ORDER = 0x73747265616D  # keeps the keys of this order apart from all others
_MOST_LOGGED = 10


def streamed_order(size: int, position: int, count: int, *, seed: int) -> list[int]:
    """Return a stretch of an endless shuffled order, without making a whole permutation.

    Every pass is a permutation of its own, as in ``shuffled_order`` (but not the same one).

    Args:
        size: How many are ordered, at least 1.
        position: Where the stretch begins, counted from the start of the run.
        count: Its length.
        seed: Of the order.
    """
    numbers: list[int] = []
    while len(numbers) < count:
        pass_number, start = divmod(position + len(numbers), size)
        stop = min(size, start + count - len(numbers))
        key = combine_keys(seed, _ORDER, pass_number)
        numbers += permuted(torch.arange(start, stop), size, key=key).tolist()
    return numbers


class StreamedPrompts(PromptSource):
    """Prompts that stay on the disk and are read and tokenised when their turn comes.

    The order is a full shuffle of the file, anew in every pass. Memory: 8 bytes a record for its
    place, and with ``validate: all`` 8 more. Prompts over the length limit that are to be dropped,
    and records that are skipped, give their place to the next of the order; the position of the
    run counts them.

    Args:
        path: A ``.jsonl``, ``.txt``, ``.csv``, ``.tsv`` or ``.parquet`` file, a folder that
            ``save_to_disk`` of `datasets` wrote, or ``hub:NAME`` or ``hub:NAME:SPLIT``.
        fields: Our name -> their column, such as ``{prompt: question}``; null leaves a column out.
        on_error: A broken or incomplete record is an ``error``, or left out, counted and logged
            (``skip``). A file that is not UTF-8 is always an error.
        validate: ``all`` reads every record once before the run and finds the bad ones then (but
            for the length limit, which is seen to when a prompt's turn comes); ``lazy`` finds one
            when its turn comes, which may be hours later.
        last_answer: See ``FilePrompts``.
        cache: Keep the places of the records beside the file, as ``NAME.index.npz``, for the next
            start.
        split: Part of a dataset that has several.
        delimiter: Between the cells of a CSV file; None is ``,``, or a tab in a TSV file.
    """

    def __init__(
        self,
        path: StrPath,
        fields: dict[str, str | None] | None = None,
        on_error: OnError = "error",
        validate: Validate = "all",
        last_answer: LastAnswer = "error",
        cache: bool = False,
        split: str | None = None,
        delimiter: str | None = None,
    ) -> None:
        if validate not in ("all", "lazy"):
            raise ValueError(f"`validate` must be one of all, lazy, got {validate!r}.")
        BadRecords(str(path), on_error)  # checks the choice
        self.path = path
        self.fields = fields
        self.on_error: OnError = on_error
        self.validate: Validate = validate
        self.last_answer = checked_last_answer(last_answer)
        self.cache = cache
        self.split = split
        self.delimiter = delimiter

    def rows(self) -> Rows:
        """Open the records for random access."""
        return open_rows(
            self.path,
            fields=self.fields,
            split=self.split,
            delimiter=self.delimiter,
            cache=self.cache,
        )

    def read(self) -> list[RawPrompt]:
        """Return all prompts at once; ``iterate`` needs no memory for that."""
        return list(self.iterate())

    def iterate(self) -> Iterator[RawPrompt]:
        """Yield the prompts in the order of the file.

        Raises:
            DataError: The file cannot be read, or (at the end) has unusable records.
        """
        for _, raw in self.scan(self.rows()):
            yield raw

    def scan(
        self, rows: Rows, check: Callable[[RawPrompt], None] | None = None
    ) -> Iterator[tuple[int, RawPrompt]]:
        """Yield number and prompt of every usable record; report the others at the end.

        Args:
            rows: The records.
            check: Raises `DataError` for a prompt that is not usable either.
        """
        bad = BadRecords(rows.name, self.on_error)
        for number, found in enumerate(rows.read(range(len(rows)))):
            raw: RawPrompt | None = None
            with bad.collecting():
                read = self.prompt(found)
                if check is not None:
                    check(read)
                raw = read
            if raw is not None:
                yield number, raw
        self.num_skipped = bad.num_bad
        bad.report()
        if not bad.num_good:
            raise DataError("holds no usable record.", path=rows.name)

    def prompt(self, found: Record | DataError) -> RawPrompt:
        """Return the prompt of a record.

        Raises:
            DataError: It is none, or could not be read.
        """
        if isinstance(found, DataError):
            raise found
        return prompt_of(found, last_answer=self.last_answer)

    def feed(self, reader: PromptReader) -> PromptFeed:
        """Return the shuffled order; with ``validate: all`` every record is looked at first."""
        rows = self.rows()
        if self.validate == "all":
            return _validated(self, rows, reader)
        if reader.deduplicate is not None:
            raise ConfigError(
                "`deduplicate` must know all prompts of a stream before the run: set "
                f"`validate: all` for {rows.name}, or leave `deduplicate` out."
            )
        return StreamFeed(self, rows, reader)


class StreamFeed(PromptFeed):
    """The shuffled order of a stream; see ``PromptFeed``.

    Args:
        source: Its settings.
        rows: The records.
        reader: How prompts become token ids.
        numbers: Records that are gone through; None for all.
        identities: Their ``prompt_key``; None where they are not known.
        num_duplicates: Prompts left out because they had come before.
    """

    def __init__(
        self,
        source: StreamedPrompts,
        rows: Rows,
        reader: PromptReader,
        *,
        numbers: NDArray[np.int64] | None = None,
        identities: Keys | None = None,
        num_duplicates: int = 0,
    ) -> None:
        self.source = source
        self.rows = rows
        self.reader = reader
        self.numbers = numbers
        self.identities = identities
        self.num_duplicates = num_duplicates
        self.num_skipped = source.num_skipped
        self.num_dropped = 0
        self.num_truncated = 0

    def __len__(self) -> int:
        return len(self.rows) if self.numbers is None else len(self.numbers)

    def keys(self) -> Keys | None:
        """Numbers of the prompts by ``prompt_key``, if all were looked at."""
        return self.identities

    def at(self, position: int, count: int, *, seed: int) -> list[Prompt | None]:
        """Read and tokenise the prompts of a stretch of the order; see ``PromptFeed``."""
        numbers = streamed_order(len(self), position, count, seed=seed)
        raws = [self._renderable(raw) for raw in self._raws(numbers)]
        usable = [place for place, raw in enumerate(raws) if raw is not None]
        limited = self.reader.tokenized([raw for raw in raws if raw is not None])
        self._count(len(usable) - len(limited.kept), limited.num_truncated)
        found: list[Prompt | None] = [None] * count
        for kept, record, ids in zip(limited.kept, limited.records, limited.ids, strict=True):
            found[usable[kept]] = record, ids
        return found

    def _raws(self, numbers: Sequence[int]) -> list[RawPrompt | None]:
        chosen = numbers if self.numbers is None else self.numbers[numbers].tolist()
        return [self._raw(found) for found in self.rows.read(chosen)]

    def _raw(self, found: Record | DataError) -> RawPrompt | None:
        """Return the prompt of a record; None if it is skipped or not of this part."""
        try:
            raw = self.source.prompt(found)
        except DataError as error:
            self._skip(error)
            return None
        return raw if self.reader.wants(raw) else None

    def _renderable(self, raw: RawPrompt | None) -> RawPrompt | None:
        """Return the prompt; None if no text can be made of it and such are skipped."""
        if raw is None or self.source.on_error == "error":
            return raw
        try:
            self.reader.check(raw)
        except DataError as error:
            self._skip(error)
            return None
        return raw

    def _count(self, dropped: int, truncated: int) -> None:
        """Count what the length limit did, and say it each time that the number has doubled."""
        before = self.num_dropped, self.num_truncated
        self.num_dropped += dropped
        self.num_truncated += truncated
        limit, name = self.reader.max_prompt_tokens, self.rows.name
        if self.num_dropped.bit_length() > before[0].bit_length():
            log.warning(
                "%s: %d prompts dropped so far: over %d tokens", name, self.num_dropped, limit
            )
        if self.num_truncated.bit_length() > before[1].bit_length():
            log.warning("%s: %d prompts cut so far: to %d tokens", name, self.num_truncated, limit)

    def _skip(self, error: DataError) -> None:
        if self.source.on_error == "error":
            advice = " Such records are left out with `on_error: skip`."
            raise DataError(
                error.args[0] + advice, path=error.path, line=error.line, column=error.column
            ) from error
        self.num_skipped += 1
        if self.num_skipped <= _MOST_LOGGED:
            log.warning("skipped: %s", error)


def _validated(source: StreamedPrompts, rows: Rows, reader: PromptReader) -> StreamFeed:
    """Look at every record once; what is left is known to be usable, but for its length."""
    log.info("%s: reading %d records once, to check them", rows.name, len(rows))
    numbers, exact, alike = array("q"), array("Q"), array("Q")
    for number, raw in source.scan(rows, reader.check):
        if reader.wants(raw):
            numbers.append(number)
            exact.append(prompt_key(raw))
            if reader.deduplicate is not None:
                alike.append(prompt_key(raw, likeness=reader.deduplicate))
    if not numbers:
        raise DataError("no prompt falls into this part of the split: give more, or another share.")
    chosen, keys = np.frombuffer(numbers, np.int64), np.frombuffer(exact, np.uint64)
    if reader.deduplicate is not None:
        firsts = np.sort(np.unique(np.frombuffer(alike, np.uint64), return_index=True)[1])
        chosen, keys = chosen[firsts], keys[firsts]
        log.warning("%d of %d prompts left out: duplicates", len(exact) - len(keys), len(exact))
    return StreamFeed(
        source,
        rows,
        replace(reader, keep=None),
        numbers=None if len(chosen) == len(rows) else chosen,
        identities=keys,
        num_duplicates=len(exact) - len(keys),
    )
