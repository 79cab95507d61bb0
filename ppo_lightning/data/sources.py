"""Where prompts come from: lists and files, read whole and checked before anything is loaded."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal

from ppo_lightning.data.records import RawPrompt, raw_prompt
from ppo_lightning.errors import DataError
from ppo_lightning.io import read_jsonl, read_text

__all__ = [
    "JsonlPrompts",
    "PromptList",
    "PromptSource",
    "RawPrompt",
    "TextPrompts",
    "as_source",
]

log = logging.getLogger(__name__)

StrPath = str | PathLike[str]

_MOST_LISTED = 10  # bad records spelled out in one error


class PromptSource(ABC):
    """Something that prompts can be read from. Own sources subclass this.

    Attributes:
        num_skipped: Records that the last ``read`` left out because they were unusable.
    """

    num_skipped: int = 0

    @abstractmethod
    def read(self) -> list[RawPrompt]:
        """Return all prompts, in the order of the source: the same ones at every call."""


class PromptList(PromptSource):
    """Prompts written in the config or made by a program.

    Args:
        prompts: Strings; or objects with ``prompt`` (a string) or ``messages`` (a list of turns
            ``{role, content}``) and anything that the reward components want.
    """

    def __init__(self, prompts: Sequence[str | Mapping[str, Any]]) -> None:
        self.prompts = list(prompts)

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            DataError: The list is empty or an entry is no prompt; names its place in the list.
        """
        if not self.prompts:
            raise DataError("the list of prompts is empty.")
        return [_listed(entry, f"prompts[{i}]") for i, entry in enumerate(self.prompts)]


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
            DataError: The file is missing, empty or not UTF-8.
        """
        _require_file(self.path)
        # Not `splitlines`: it also cuts at U+2028 and other characters that texts may hold.
        lines = enumerate(read_text(self.path).split("\n"), start=1)
        texts = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
        if not texts:
            raise DataError("holds no prompts: every line is blank.", path=self.path)
        return [RawPrompt(prompt=text, origin=_place(self.path, number)) for number, text in texts]


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
    """

    def __init__(
        self,
        path: StrPath,
        prompt_field: str | None = "prompt",
        messages_field: str | None = "messages",
        on_error: Literal["error", "skip"] = "error",
    ) -> None:
        if prompt_field is None and messages_field is None:
            raise ValueError("`prompt_field` and `messages_field` must not both be null.")
        self.path = path
        self.prompt_field = prompt_field
        self.messages_field = messages_field
        self.on_error = on_error

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            DataError: The file is missing, holds no prompt or is not UTF-8, or records are
                unusable and ``on_error`` is ``error``; names file, line, keys and the setting.
        """
        _require_file(self.path)
        bad: list[DataError] = []
        prompts: list[RawPrompt] = []
        for number, record in read_jsonl(self.path, on_bad=lambda error: _keep(error, bad)):
            prompts += self._prompt(record, number, bad)
        self._report(bad, len(prompts) + len(bad))
        if not prompts:
            raise DataError("holds no usable prompt.", path=self.path)
        return prompts

    def _prompt(
        self, record: Mapping[str, Any], number: int, bad: list[DataError]
    ) -> list[RawPrompt]:
        """Return the record's prompt; or none, and put what is wrong with it in ``bad``."""
        fields = {"prompt_field": self.prompt_field, "messages_field": self.messages_field}
        try:
            return [raw_prompt(record, **fields, origin=_place(self.path, number))]
        except DataError as error:
            bad.append(DataError(error.args[0], path=self.path, line=number))
            return []

    def _report(self, bad: Sequence[DataError], num_records: int) -> None:
        self.num_skipped = len(bad)
        if not bad:
            return
        listed = "\n  ".join(str(error) for error in bad[:_MOST_LISTED])
        more = f"\n  ... and {len(bad) - _MOST_LISTED} more" if len(bad) > _MOST_LISTED else ""
        summary = f"{len(bad)} of {num_records} records cannot be used:\n  {listed}{more}"
        if self.on_error == "error":
            advice = "Mend them, or leave them out with `on_error: skip`."
            raise DataError(f"{summary}\n{advice}", path=self.path, line=bad[0].line)
        log.warning("%s: skipped, %s", fspath(self.path), summary)


def as_source(
    value: PromptSource | StrPath | Sequence[str | Mapping[str, Any]],
) -> PromptSource:
    """Return the source that a setting means: itself, a list, or a file by its ending.

    Args:
        value: A source; a list of prompts; or the path of a ``.jsonl`` or ``.txt`` file.

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
    if ending == ".txt":
        return TextPrompts(value)
    raise DataError(
        f"prompts are read from `.jsonl` and `.txt` files, not from `{ending or 'no ending'}`. "
        "Rename the file, give a list of prompts, or name a source by its `class_path`.",
        path=value,
    )


def _listed(entry: Any, origin: str) -> RawPrompt:
    if isinstance(entry, str):
        return RawPrompt(prompt=entry, origin=origin)
    if isinstance(entry, Mapping):
        return raw_prompt(entry, prompt_field="prompt", messages_field="messages", origin=origin)
    raise DataError(f"must be a string or an object, got {entry!r:.60}.", path=origin)


def _keep(error: DataError, bad: list[DataError]) -> None:
    # The encoding is a fault of the whole file: skipping the lines that show it would keep the
    # others, read by luck.
    if isinstance(error.__cause__, UnicodeDecodeError):
        raise error
    bad.append(error)


def _place(path: StrPath, number: int) -> str:
    return f"{fspath(path)}:{number}"


def _require_file(path: StrPath) -> None:
    if not Path(path).is_file():
        message = f"no such file; relative paths start at the working directory, {Path.cwd()}."
        raise DataError(message, path=path)
