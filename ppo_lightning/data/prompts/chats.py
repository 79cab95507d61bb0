"""The turns of a chat as files hold them: roles and contents, or speakers and values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_lightning.errors import DataError
from ppo_lightning.types import Message

__all__ = ["ROLES", "read_turns", "text_problem", "turn_problem"]

ROLES = ("system", "user", "assistant", "tool")

_ROLE_OF_SPEAKER = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def read_turns(
    value: Any, key: str, *, origin: str = "", may_be_text: bool = False
) -> tuple[Message, ...]:
    """Return the turns of a chat with their role and content; other keys are left out.

    Read are ``[{role, content}, ...]``; the same with contents as parts ``[{type: text, text},
    ...]``; ``[{from, value}, ...]``, whose speakers become roles (human: user, gpt: assistant);
    and any of these as JSON text, as a cell of a table holds it.

    Args:
        value: What stands in the record.
        key: Where it stands there, for the message.
        origin: Where the record stands, for the message.
        may_be_text: Whether a string would have been right too, for the message.

    Raises:
        DataError: It is no list of turns; names the turn and what is wrong with it.
    """
    turns = _parsed(value)
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        kinds = "a string or a list of turns" if may_be_text else "a list of turns"
        raise DataError(f"`{key}` must be {kinds}, got {value!r:.60}.", path=origin or None)
    convert = _of_speakers if turns and all(map(_has_speaker, turns)) else _of_parts
    found: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        read, problem = convert(turn)
        problem = problem or turn_problem(read)
        if problem is not None:
            raise DataError(f"turn {number} of `{key}` {problem}", path=origin or None)
        found.append({"role": read["role"], "content": read["content"]})
    return tuple(found)


def turn_problem(turn: Any) -> str | None:
    """Say what keeps something from being a turn ``{role, content}``, or None."""
    if not isinstance(turn, Mapping):
        return f"must be an object with `role` and `content`, got {turn!r:.60}."
    for key in ("role", "content"):
        if not isinstance(turn.get(key), str):
            found = ", ".join(f"`{name}`" for name in turn) or "none"
            return f"needs a string under `{key}`; keys found: {found}."
    if turn["role"] not in ROLES:
        return f"has the unknown role `{turn['role']}`. Known roles: {', '.join(ROLES)}."
    return None


def text_problem(text: str) -> str | None:
    """Say what keeps a string from being read by a tokenizer, or None.

    JSON lets lone surrogates through, which no tokenizer takes; and a NUL character is never part
    of a text, but of one in UTF-16 that passes for UTF-8, or of a file that a crash cut off.
    """
    if "\0" in text:
        return "holds a NUL character, as UTF-16 and files cut off by a crash do. Mend the text."
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, as a cut emoji escape leaves it. Mend the text."
    return None


def _parsed(value: Any) -> Any:
    """Read a list that stands as JSON text; anything else is returned as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _has_speaker(turn: Any) -> bool:
    return isinstance(turn, Mapping) and {"from", "value"} <= turn.keys() and "role" not in turn


def _of_speakers(turn: Any) -> tuple[Any, str | None]:
    """Convert ``{from, value}``."""
    role = _ROLE_OF_SPEAKER.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join(_ROLE_OF_SPEAKER)
        return turn, f"has the unknown speaker `{turn['from']}` in `from`. Known ones: {known}."
    if not isinstance(turn["value"], str):
        return turn, f"needs a string under `value`, got {turn['value']!r:.60}."
    return {"role": role, "content": turn["value"]}, None


def _of_parts(turn: Any) -> tuple[Any, str | None]:
    """Join a content that is a list of parts."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list | tuple):
        return turn, None
    texts: list[str] = []
    for part in turn["content"]:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            return turn, (
                "needs a string under `content`, or parts `{type: text, text: ...}`; it has one of "
                f"the type `{kind}`. Only text can be read."
            )
        texts.append(part["text"])
    return {**turn, "content": "".join(texts)}, None
