"""Demonstrations: answers to learn from, as records hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_lightning.data.prompts.chats import read_turns, text_problem
from ppo_lightning.data.prompts.identity import prompt_key
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.records.base import Record
from ppo_lightning.data.records.plain import is_null
from ppo_lightning.types import Message

__all__ = ["Demonstration", "demonstration_of"]

CONVERSATIONS = "conversations"


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What a policy is to imitate: one of three forms.

    Args:
        prompt: A plain string, with ``response``.
        response: The answer to it.
        messages: A chat that ends with the assistant's turn; all of the assistant's are learned.
        text: Plain text; all of it is learned.
        origin: Where it was read (``chats.jsonl:17``), for messages about it.
    """

    prompt: str | None = None
    response: str | None = None
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    origin: str = ""

    @property
    def opening(self) -> RawPrompt:
        """What the first answer answers; a plain text is its own opening."""
        if self.messages is None:
            return RawPrompt(prompt=self.prompt if self.text is None else self.text)
        answered = next(i for i, turn in enumerate(self.messages) if turn["role"] == "assistant")
        before = self.messages[:answered]
        if before[-1]["role"] == "user":
            return RawPrompt(messages=before)
        return RawPrompt(prompt="\n".join(turn["content"] for turn in before))

    @property
    def prompt_key(self) -> int:
        """64 bits that demonstrations of one prompt share, and prompts of the other data modules.

        Case and white space make no difference.
        """
        return prompt_key(self.opening, likeness="normalized")


def demonstration_of(record: Record) -> Demonstration:
    """Read a record: ``prompt`` and ``response``, or ``messages``, or ``text``.

    ``prompt`` may be the turns of a chat, which ``response`` then answers. Other keys are ignored.

    Raises:
        DataError: None of the forms is there, or several are, or the value is none.
    """
    values = record.values
    given = [name for name in ("prompt", "messages", "text") if not is_null(values.get(name))]
    if not given and isinstance(values.get(CONVERSATIONS), list):
        given = [CONVERSATIONS]
    if not given:
        raise record.error(record.missing(["prompt", "messages", "text"]))
    if len(given) > 1:
        raise record.error(
            f"has both `{given[0]}` and `{given[1]}`. Leave one of them out, such as with "
            f"`fields: {{{given[1]}: null}}`."
        )
    if given == ["text"]:
        text = _text(record, "text", values["text"])
        return Demonstration(text=text, origin=record.origin)
    if given == ["prompt"]:
        return _answered(record, values)
    turns = read_turns(values[given[0]], given[0], origin=record.origin)
    return Demonstration(messages=_chat(record, given[0], turns), origin=record.origin)


def _answered(record: Record, values: Mapping[str, Any]) -> Demonstration:
    """Read a prompt, a string or turns, with its response."""
    response = _text(record, "response", record.required("response"))
    prompt = values["prompt"]
    if isinstance(prompt, str):
        if problem := text_problem(prompt):
            raise record.error(f"`prompt` {problem}")
        return Demonstration(prompt=prompt, response=response, origin=record.origin)
    turns = read_turns(prompt, "prompt", origin=record.origin, may_be_text=True)
    if turns and turns[-1]["role"] == "assistant":
        raise record.error(
            "`prompt` ends with a turn of role `assistant`, which `response` would follow. Give "
            "the whole chat under `messages`."
        )
    chat = (*turns, {"role": "assistant", "content": response})
    return Demonstration(messages=_chat(record, "prompt", chat), origin=record.origin)


def _chat(record: Record, key: str, turns: Sequence[Message]) -> tuple[Message, ...]:
    """Refuse a chat that nothing can be learned from."""
    for number, turn in enumerate(turns, start=1):
        if problem := text_problem(turn["content"]):
            raise record.error(f"turn {number} of `{key}` {problem}")
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise record.error(f"turn {number} of `{key}`, the assistant's, is empty.")
    if not any(turn["role"] == "assistant" for turn in turns):
        raise record.error(f"`{key}` has no turn of role `assistant`: there is nothing to learn.")
    if turns[0]["role"] == "assistant":
        raise record.error(
            f"`{key}` begins with a turn of role `assistant`, which answers nothing."
        )
    if turns[-1]["role"] != "assistant":
        raise record.error(
            f"`{key}` ends with a turn of role `{turns[-1]['role']}`, which nobody answers. End it "
            "with the assistant's turn."
        )
    return tuple(turns)


def _text(record: Record, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise record.error(f"`{key}` must be a string, got {value!r:.60}.")
    if problem := text_problem(value):
        raise record.error(f"`{key}` {problem}")
    if not value.strip():
        raise record.error(f"`{key}` is empty: there is nothing to learn.")
    return value
