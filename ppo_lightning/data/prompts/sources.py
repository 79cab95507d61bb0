"""Where prompts come from: lists and files, read whole and checked before anything is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.configs import InlineRecord
from ppo_lightning.data.prompts.raw import (
    LastAnswer,
    RawPrompt,
    checked_last_answer,
    prompt_of,
    raw_prompt,
)
from ppo_lightning.data.records.bad_records import OnError
from ppo_lightning.data.records.base import Record, RecordSource, StrPath, read_examples
from ppo_lightning.data.records.files import JsonlRecords, TextRecords
from ppo_lightning.data.records.formats import as_records
from ppo_lightning.data.records.plain import plain
from ppo_lightning.errors import DataError

if TYPE_CHECKING:
    from ppo_lightning.data.prompts.feeds import PromptFeed
    from ppo_lightning.data.prompts.reader import PromptReader

__all__ = [
    "FilePrompts",
    "JsonlPrompts",
    "PromptList",
    "PromptSource",
    "Prompts",
    "RawPrompt",
    "TextPrompts",
    "as_source",
]


class PromptSource(ABC):
    """Something that prompts can be read from. Own sources subclass this.

    Attributes:
        num_skipped: Records that the last reading left out because they were unusable.
    """

    num_skipped: int = 0

    @abstractmethod
    def read(self) -> list[RawPrompt]:
        """Return all prompts, in the order of the source: the same ones at every call."""

    def iterate(self) -> Iterator[RawPrompt]:
        """Yield what ``read`` returns; sources larger than memory do so one by one."""
        yield from self.read()

    def feed(self, reader: PromptReader) -> PromptFeed:
        """Return the order that training takes its prompts from: here, all of them in memory.

        Args:
            reader: How prompts become token ids.
        """
        from ppo_lightning.data.prompts.prompt_set import (
            PromptSet,  # it reads sources: a circle, at the top
        )

        return PromptSet.of(self, reader)


# `Path` stands here for jsonargparse: in the place of an argument that may be a class it puts the
# content of the file that is named there, unless the argument may also be a path. It comes last:
# what a path is made of stays a text, and to write a config, a path would make a text of a list.
Prompts = PromptSource | str | list[str | InlineRecord] | Path
"""A source, a path to a file of a known ending, a dataset's folder or ``hub:NAME``, or the prompts
themselves: strings, or objects like the lines of a ``.jsonl`` file."""


class PromptList(PromptSource):
    """Prompts written in the config or made by a program.

    Args:
        prompts: Strings; or objects with ``prompt`` (a string) or ``messages`` (a list of turns
            ``{role, content}``) and anything that the reward components want.
        last_answer: What happens to a chat that ends with the assistant's turn; see
            ``FilePrompts``.
    """

    def __init__(
        self, prompts: Sequence[str | Mapping[str, Any]], last_answer: LastAnswer = "error"
    ) -> None:
        self.prompts = list(prompts)
        self.last_answer = checked_last_answer(last_answer)

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            DataError: The list is empty or an entry is no prompt; names its place in the list.
        """
        if not self.prompts:
            raise DataError("the list of prompts is empty.")
        return [self._listed(entry, f"prompts[{i}]") for i, entry in enumerate(self.prompts)]

    def _listed(self, entry: Any, origin: str) -> RawPrompt:
        if isinstance(entry, str):
            return RawPrompt(prompt=entry, origin=origin)
        if isinstance(entry, Mapping):
            return raw_prompt(
                plain(entry),
                prompt_field="prompt",
                messages_field="messages",
                origin=origin,
                last_answer=self.last_answer,
            )
        raise DataError(f"must be a string or an object, got {entry!r:.60}.", path=origin)


class TextPrompts(PromptSource):
    """One plain prompt a line; blank lines are skipped.

    Args:
        path: A UTF-8 text file.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = path

    def read(self) -> list[RawPrompt]:
        r"""Return the prompts. Lines end at ``\n`` only, a ``\r`` before it is dropped.

        Raises:
            DataError: The file is missing, empty or not UTF-8, or a line is no text.
        """
        lines = TextRecords(self.path, text_name="prompt").records()
        prompts = [RawPrompt(prompt=row.values["prompt"], origin=row.origin) for row in lines]
        if not prompts:
            raise DataError("holds no prompts: every line is blank.", path=self.path)
        return prompts


class JsonlPrompts(PromptSource):
    """One JSON object a line; what is not the prompt becomes metadata for the rewards.

    Args:
        path: A UTF-8 file, with or without a byte-order mark; blank lines are skipped.
        prompt_field: Key of a plain prompt (a list of turns is accepted too); null looks for
            none.
        messages_field: Key of a chat, a list of turns ``{role, content}`` (other keys of a turn
            are not used); null looks for none.
        on_error: Broken or incomplete records are an ``error`` that lists them, or they are left
            out, counted and logged (``skip``). A file that is not UTF-8 is always an error.
        last_answer: What happens to a chat that ends with the assistant's turn; see
            ``FilePrompts``.
    """

    def __init__(
        self,
        path: StrPath,
        prompt_field: str | None = "prompt",
        messages_field: str | None = "messages",
        on_error: OnError = "error",
        last_answer: LastAnswer = "error",
    ) -> None:
        if prompt_field is None and messages_field is None:
            raise ValueError("`prompt_field` and `messages_field` must not both be null.")
        self.path = path
        self.prompt_field = prompt_field
        self.messages_field = messages_field
        self.on_error = on_error
        self.last_answer = checked_last_answer(last_answer)

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            DataError: The file is missing, holds no prompt or is not UTF-8, or records are
                unusable and ``on_error`` is ``error``; names file, line, keys and the setting.
        """
        records = JsonlRecords(self.path, on_error=self.on_error)
        prompts = read_examples(records, self._prompt)
        self.num_skipped = records.num_skipped
        return prompts

    def _prompt(self, record: Record) -> RawPrompt:
        return raw_prompt(
            record.values,
            prompt_field=self.prompt_field,
            messages_field=self.messages_field,
            origin=record.origin,
            last_answer=self.last_answer,
        )


class FilePrompts(PromptSource):
    """Prompts of a file or dataset of any format that is known.

    A record has ``prompt`` (a string, or the turns of a chat) or ``messages`` (turns; also
    ``conversations``, as ``[{from, value}]``); its other columns become metadata for the rewards.

    Args:
        path: A file that ends in ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet`` or
            ``.txt``; a folder that ``save_to_disk`` of `datasets` wrote; ``hub:NAME`` or
            ``hub:NAME:SPLIT``.
        fields: Our name -> their column, such as ``{prompt: question}``; null leaves a column out.
        on_error: Broken or incomplete records are an ``error`` that lists them, or they are left
            out, counted and logged (``skip``). A file that is not UTF-8 is always an error.
        last_answer: A chat that ends with the assistant's turn is an ``error``; ``drop`` takes
            that turn off and keeps its text as the metadata ``reference_answer``.
        split: Part of a dataset that has several.
        key: Where a JSON file that is an object holds the list; None takes its only one.
        delimiter: Between the cells of a CSV file; None is ``,``, or a tab in a TSV file.
    """

    def __init__(
        self,
        path: StrPath,
        fields: dict[str, str | None] | None = None,
        on_error: OnError = "error",
        last_answer: LastAnswer = "error",
        split: str | None = None,
        key: str | None = None,
        delimiter: str | None = None,
    ) -> None:
        self.last_answer = checked_last_answer(last_answer)
        self.source: RecordSource = as_records(
            path,
            fields=fields,
            on_error=on_error,
            split=split,
            key=key,
            delimiter=delimiter,
            text_name="prompt",
        )

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            DataError: The file is missing or cannot be read, holds no prompt, or records are
                unusable and ``on_error`` is ``error``; names each by file and line.
        """
        prompts = read_examples(self.source, self._prompt)
        self.num_skipped = self.source.num_skipped
        return prompts

    def _prompt(self, record: Record) -> RawPrompt:
        return prompt_of(record, last_answer=self.last_answer)


def as_source(
    value: PromptSource | StrPath | Sequence[str | Mapping[str, Any]],
) -> PromptSource:
    """Return the source that a setting means: itself, a list, or a file by its ending.

    Args:
        value: A source; a list of prompts; or a path, as for ``FilePrompts``.

    Raises:
        DataError: The path has another ending.
    """
    if isinstance(value, PromptSource):
        return value
    if not isinstance(value, str | PathLike):
        return PromptList(value)
    ending = Path(value).suffix.lower()
    if ending == ".jsonl":
        return JsonlPrompts(value)
    return TextPrompts(value) if ending == ".txt" else FilePrompts(value)
