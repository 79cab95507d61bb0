"""One prompt before any tokenizer saw it, and what makes a record usable as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_lightning.data.prompts.chats import read_turns, text_problem
from ppo_lightning.data.records.base import Record
from ppo_lightning.data.records.plain import is_null, null_mark
from ppo_lightning.errors import DataError, nearest
from ppo_lightning.types import Message

__all__ = [
    "REFERENCE_ANSWER",
    "LastAnswer",
    "RawPrompt",
    "checked_last_answer",
    "prompt_of",
    "raw_prompt",
]

LastAnswer = Literal["error", "drop"]

REFERENCE_ANSWER = "reference_answer"
"""Metadata key of the answer that ``last_answer: drop`` takes off a chat."""

CONVERSATIONS = "conversations"
"""Where many files have a chat, as ``[{from, value}, ...]``; read in the place of `messages`."""


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """A prompt before any tokenizer saw it: a plain string or a chat, not both.

    Args:
        prompt: A plain string.
        messages: The turns of a chat, which ends with a turn that the policy answers.
        metadata: The record's other fields, handed to the reward components.
        origin: Where it was read (``prompts.jsonl:17``), for messages about it.

    Raises:
        DataError: Neither or both are given, the text is not valid Unicode, or the chat cannot be
            answered: no user turn, or the assistant has the last word.
    """

    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise DataError(problem, path=self.origin or None)

    def _problem(self) -> str | None:
        if (self.prompt is None) == (self.messages is None):
            return "give either `prompt` (a string) or `messages` (a chat)."
        turns = self.messages or ()
        for text in (self.prompt or "", *(turn["content"] for turn in turns)):
            problem = text_problem(text)
            if problem is not None:
                return problem
        return None if self.messages is None else _chat_problem(turns)


def checked_last_answer(choice: LastAnswer) -> LastAnswer:
    """Return the choice.

    Raises:
        ValueError: It is none of those that there are.
    """
    if choice not in ("error", "drop"):
        raise ValueError(f"`last_answer` must be one of error, drop, got {choice!r}.")
    return choice


def prompt_of(record: Record, *, last_answer: LastAnswer = "error") -> RawPrompt:
    """Read a record with ``prompt`` or ``messages``, everything else as metadata.

    Args:
        record: As a `RecordSource` gives it, under our names.
        last_answer: A chat that ends with the assistant's turn is an ``error``; ``drop`` takes
            that turn off and keeps its text in the metadata, as ``reference_answer``.

    Raises:
        DataError: The keys are missing, both are there, or the value is no prompt.
    """
    return raw_prompt(
        record.values,
        prompt_field="prompt",
        messages_field="messages",
        origin=record.origin,
        last_answer=last_answer,
        advice="fields",
    )


def raw_prompt(
    record: Mapping[str, Any],
    *,
    prompt_field: str | None,
    messages_field: str | None,
    origin: str,
    last_answer: LastAnswer = "error",
    advice: Literal["options", "fields"] = "options",
) -> RawPrompt:
    """Read one record: the prompt under its key, everything else as metadata.

    Args:
        record: Keys and values as they stand in the file.
        prompt_field: Key of a string; a list of turns is accepted too. None: not looked for.
        messages_field: Key of a list of turns. None: not looked for. ``conversations`` stands in
            for ``messages`` where that is missing.
        origin: Where the record stands, for messages about it.
        last_answer: See `prompt_of`.
        advice: Whether messages name the settings ``prompt_field`` and ``messages_field``
            (``options``), or ``fields``.

    Raises:
        DataError: The keys are missing, both are there, or the value is no prompt.
    """
    wanted = [key for key in dict.fromkeys((prompt_field, messages_field)) if key is not None]
    found = [key for key in wanted if not is_null(record.get(key))]
    if not found and messages_field == "messages" and isinstance(record.get(CONVERSATIONS), list):
        wanted, found = [*wanted, CONVERSATIONS], [CONVERSATIONS]
    if len(found) != 1:
        problem = _ambiguous(found, advice) if found else _missing(record, wanted, advice)
        raise DataError(problem, path=origin or None)
    value = record[found[0]]
    rest = {key: value for key, value in record.items() if key not in wanted}
    may_be_text = found[0] == prompt_field
    if isinstance(value, str) and may_be_text:
        return RawPrompt(prompt=value, metadata=rest, origin=origin)
    messages = read_turns(value, found[0], origin=origin, may_be_text=may_be_text)
    if last_answer == "drop" and messages and messages[-1]["role"] == "assistant":
        messages, rest = _without_answer(messages, rest, origin)
    return RawPrompt(messages=messages, metadata=rest, origin=origin)


def _without_answer(
    messages: tuple[Message, ...], rest: dict[str, Any], origin: str
) -> tuple[tuple[Message, ...], dict[str, Any]]:
    if REFERENCE_ANSWER in rest:
        raise DataError(
            f"has a `{REFERENCE_ANSWER}` of its own, where the answer that `last_answer: drop` "
            "takes off the chat would be kept. Rename that key.",
            path=origin or None,
        )
    return messages[:-1], {**rest, REFERENCE_ANSWER: messages[-1]["content"]}


def _missing(record: Mapping[str, Any], wanted: Sequence[str], advice: str) -> str:
    keys = [f"`{key}`{null_mark(value)}" for key, value in record.items()]
    texts = [key for key, value in record.items() if isinstance(value, str)]
    near = [found for key in wanted if (found := nearest(key, record)) and found not in wanted]
    guess = next(iter(near or (texts if len(texts) == 1 else ())), None)
    if advice == "fields":
        named = guess or "their_name"
        remedy = f"Name the key that holds it, such as `fields: {{prompt: {named}}}`."
    else:
        example = f", such as `prompt_field: {guess}`" if guess else ""
        remedy = (
            "Set `prompt_field` (a string) or `messages_field` (a chat) to the key that holds the "
            f"prompt{example}."
        )
    return (
        f"has no {' or '.join(f'`{key}`' for key in wanted)}; "
        f"keys found: {', '.join(keys) or 'none'}. {remedy}"
    )


def _ambiguous(found: Sequence[str], advice: str) -> str:
    if advice == "fields":
        remedy = f"Leave one of them out, such as with `fields: {{{found[1]}: null}}`."
    else:
        remedy = (
            "Set `prompt_field` or `messages_field` to null, so that one of them is the prompt; "
            "the other goes to the reward components."
        )
    return f"has both `{found[0]}` and `{found[1]}`. {remedy}"


def _chat_problem(turns: Sequence[Message]) -> str | None:
    if not any(turn["role"] == "user" for turn in turns):
        return "the chat has no turn of role `user`."
    last = turns[-1]["role"]
    if last == "assistant":
        return (
            "the chat ends with a turn of role `assistant`, which leaves the policy nothing to "
            "answer. Remove that turn (`last_answer: drop` does, and keeps it for the rewards)."
        )
    if last == "system":
        return "the chat ends with a turn of role `system`. End it with the user's turn."
    return None
