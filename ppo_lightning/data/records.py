"""One prompt as it was read, and what makes a record usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.types import Message

ROLES = ("system", "user", "assistant", "tool")


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
        texts = [self.prompt or "", *(turn["content"] for turn in turns)]
        if not all(map(_is_unicode, texts)):
            return "holds half of a surrogate pair, as a cut emoji escape leaves it. Mend the text."
        return None if self.messages is None else _chat_problem(turns)


def raw_prompt(
    record: Mapping[str, Any],
    *,
    prompt_field: str | None,
    messages_field: str | None,
    origin: str,
) -> RawPrompt:
    """Read one record: the prompt under its key, everything else as metadata.

    Args:
        record: Keys and values as they stand in the file.
        prompt_field: Key of a string; a list of turns is accepted too. None: not looked for.
        messages_field: Key of a list of turns. None: not looked for.
        origin: Where the record stands, for messages about it.

    Raises:
        DataError: The keys are missing, both are there, or the value is no prompt.
    """
    wanted = [key for key in dict.fromkeys((prompt_field, messages_field)) if key is not None]
    found = [key for key in wanted if record.get(key) is not None]
    if len(found) != 1:
        problem = _ambiguous(found) if found else _missing(record, wanted)
        raise DataError(problem, path=origin or None)
    value = record[found[0]]
    rest = {key: value for key, value in record.items() if key not in wanted}
    if isinstance(value, str) and found[0] == prompt_field:
        return RawPrompt(prompt=value, metadata=rest, origin=origin)
    messages = _turns(value, found[0], origin, may_be_text=found[0] == prompt_field)
    return RawPrompt(messages=messages, metadata=rest, origin=origin)


def _missing(record: Mapping[str, Any], wanted: Sequence[str]) -> str:
    keys = [f"`{key}`" if value is not None else f"`{key}` (null)" for key, value in record.items()]
    texts = [key for key, value in record.items() if isinstance(value, str)]
    example = f", such as `prompt_field: {texts[0]}`" if len(texts) == 1 else ""
    return (
        f"has no {' or '.join(f'`{key}`' for key in wanted)}; "
        f"keys found: {', '.join(keys) or 'none'}. Set `prompt_field` (a string) or "
        f"`messages_field` (a chat) to the key that holds the prompt{example}."
    )


def _ambiguous(found: Sequence[str]) -> str:
    return (
        f"has both `{found[0]}` and `{found[1]}`. Set `prompt_field` or `messages_field` to null, "
        "so that one of them is the prompt; the other goes to the reward components."
    )


def _turns(value: Any, key: str, origin: str, *, may_be_text: bool) -> tuple[Message, ...]:
    """Return the turns of a chat with their role and content; other keys are left out."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        kinds = "a string or a list of turns" if may_be_text else "a list of turns"
        raise DataError(f"`{key}` must be {kinds}, got {value!r:.60}.", path=origin or None)
    for number, turn in enumerate(value, start=1):
        problem = _turn_problem(turn)
        if problem is not None:
            raise DataError(f"turn {number} of `{key}` {problem}", path=origin or None)
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, Mapping):
        return f"must be an object with `role` and `content`, got {turn!r:.60}."
    for key in ("role", "content"):
        if not isinstance(turn.get(key), str):
            found = ", ".join(f"`{name}`" for name in turn) or "none"
            return f"needs a string under `{key}`; keys found: {found}."
    if turn["role"] not in ROLES:
        return f"has the unknown role `{turn['role']}`. Known roles: {', '.join(ROLES)}."
    return None


def _chat_problem(turns: Sequence[Message]) -> str | None:
    if not any(turn["role"] == "user" for turn in turns):
        return "the chat has no turn of role `user`."
    last = turns[-1]["role"]
    if last == "assistant":
        return (
            "the chat ends with a turn of role `assistant`, which leaves the policy nothing to "
            "answer. Remove that turn (it may be kept under a key of its own, for the rewards)."
        )
    if last == "system":
        return "the chat ends with a turn of role `system`. End it with the user's turn."
    return None


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text: JSON lets lone surrogates through, tokenizers do not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
