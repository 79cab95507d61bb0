"""Records and prompts that a Python function returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ppo_lightning.data.prompts.raw import LastAnswer, RawPrompt, checked_last_answer, prompt_of
from ppo_lightning.data.prompts.sources import PromptSource
from ppo_lightning.data.records.bad_records import BadRecords, OnError
from ppo_lightning.data.records.base import Fields, Record, RecordSource, read_examples
from ppo_lightning.data.records.formats import as_records
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards.arguments import bind_arguments
from ppo_lightning.rewards.locate import load_function, split_target

__all__ = ["FunctionPrompts", "FunctionRecords"]


class FunctionRecords(RecordSource):
    """Records that a function returns, such as one that reads the data of a Python package.

    Args:
        function: ``package.module:name``, ``package.module.name`` or ``path/to/file.py:name``. It
            returns (or yields) objects or strings, or a ``datasets.Dataset``: the same at every
            call.
        arguments: What it is called with, by name.
        fields: See `RecordSource`.
        on_error: See `RecordSource`.
        text_name: Name that strings get.
    """

    def __init__(
        self,
        function: str,
        arguments: dict[str, Any] | None = None,
        *,
        fields: Fields | None = None,
        on_error: OnError = "error",
        text_name: str = "text",
    ) -> None:
        split_target(function)
        super().__init__(function, fields=fields, on_error=on_error)
        self.function = function
        self.arguments = dict(arguments or {})
        self.text_name = text_name

    def rows(self, bad: BadRecords) -> Iterator[Record]:
        """Call the function.

        Raises:
            ConfigError: There is no such function, it does not take an argument, or it returns
                something else.
            DataError: It returns nothing.
        """
        call = load_function(self.function)
        found = call(**bind_arguments(call, self.arguments))
        if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
            raise ConfigError(
                f"`{self.function}` must return a list of objects or strings, got {found!r:.60}."
            )
        entries: Any = found if hasattr(found, "column_names") else list(found)
        # Not the fields: they are for `records` to map.
        named = self.fields.get(self.text_name) or self.text_name
        yield from as_records(entries, name=self.function, text_name=named).rows(bad)


class FunctionPrompts(PromptSource):
    """Prompts that a function returns, such as one that reads the data of a Python package.

    Args:
        function: ``package.module:name``, ``package.module.name`` or ``path/to/file.py:name``. It
            returns (or yields) strings, or objects with ``prompt`` or ``messages`` and anything
            that the reward components want: the same at every call.
        arguments: What it is called with, by name; ``1e-6`` and the like reach it as numbers.
        fields: Our name -> their key, such as ``{prompt: question}``; null leaves a key out.
        on_error: Unusable records are an ``error`` that lists them, or are left out (``skip``).
        last_answer: See ``FilePrompts``.
    """

    def __init__(
        self,
        function: str,
        arguments: dict[str, Any] | None = None,
        fields: dict[str, str | None] | None = None,
        on_error: OnError = "error",
        last_answer: LastAnswer = "error",
    ) -> None:
        self.last_answer = checked_last_answer(last_answer)
        self.source = FunctionRecords(
            function, arguments, fields=fields, on_error=on_error, text_name="prompt"
        )

    def read(self) -> list[RawPrompt]:
        """Return the prompts.

        Raises:
            ConfigError: There is no such function, or it returns something else.
            DataError: Something that it returns is no prompt; names its place.
        """
        prompts = read_examples(self.source, self._prompt)
        self.num_skipped = self.source.num_skipped
        return prompts

    def _prompt(self, record: Record) -> RawPrompt:
        return prompt_of(record, last_answer=self.last_answer)
