"""What a reward server and its clients say to each other: version 1 of the JSON contract.

A request holds items, the answer one number for each in their order::

    POST {"version": 1, "items": [{"prompt": "…", "messages": null, "response": "…",
                                   "truncated": false}]}
    200  {"version": 1, "scores": [0.5]}

Both sides read strictly: what is no number in JSON never becomes one.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

from ppo_lightning.errors import unknown_key_message
from ppo_lightning.types import Message

VERSION = 1

SentField = Literal["prompt", "messages", "response", "truncated", "prompt_ids", "response_ids"]
FIELDS: tuple[SentField, ...] = get_args(SentField)
_KEYS = (*FIELDS, "metadata")


class BadRequest(ValueError):
    """A request that a server refuses.

    Args:
        status: HTTP status to refuse it with.
        message: What is wrong with it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BadReply(ValueError):
    """An answer that is no list of one entry for each item."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One response to score, as it arrived.

    Args:
        prompt: Prompt as given; for a chat its last user turn.
        response: Decoded response; may be empty.
        messages: Turns of the chat before the response, or None for a plain prompt.
        truncated: Whether the response ended without an end token.
        prompt_ids: Ids of the prompt, or None where they were not sent.
        response_ids: Sampled ids, or None where they were not sent.
        metadata: Fields of the prompt's record that were sent.
    """

    prompt: str
    response: str
    messages: tuple[Message, ...] | None = None
    truncated: bool = False
    prompt_ids: Sequence[int] | None = None
    response_ids: Sequence[int] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoNumber:
    """An entry of an answer that is no score.

    Args:
        shown: What it is instead, in a few characters.
    """

    shown: str


def encode_request(items: Sequence[Mapping[str, Any]]) -> bytes:
    """Write a request.

    Args:
        items: Each with keys of ``Item``.

    Raises:
        ValueError: Something in them has no form in JSON, such as NaN.
        TypeError: Likewise, such as a tensor.
    """
    request = {"version": VERSION, "items": list(items)}
    return json.dumps(request, allow_nan=False).encode("ascii")


def decode_request(body: bytes, *, max_items: int) -> list[Item]:
    """Read a request.

    Args:
        body: As it arrived.
        max_items: Most items in it.

    Raises:
        BadRequest: 400 for what is no JSON, 413 for too many items, 422 for anything else.
    """
    try:
        request = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is no JSON in UTF-8: {error}.") from error
    if not isinstance(request, dict):
        raise BadRequest(422, f"the body must be an object, not {shown(request)}.")
    if request.get("version") != VERSION or isinstance(request.get("version"), bool):
        found = shown(request["version"]) if "version" in request else "none"
        raise BadRequest(422, f"this server speaks `version` {VERSION}, got {found}.")
    _refuse_unknown(request, ("version", "items"), "the request")
    items = request.get("items")
    if not isinstance(items, list):
        raise BadRequest(422, f"`items` must be a list, got {shown(items)}.")
    if len(items) > max_items:
        raise BadRequest(413, f"{len(items)} items, and {max_items} is the most at once.")
    return [_item(item, f"items[{i}]") for i, item in enumerate(items)]


def encode_scores(scores: Iterable[float]) -> bytes:
    """Write an answer; a score that is no finite number becomes ``null``."""
    entries = [float(score) if math.isfinite(score) else None for score in scores]
    return json.dumps({"version": VERSION, "scores": entries}, allow_nan=False).encode("ascii")


def decode_scores(body: bytes, count: int) -> list[float | NoNumber]:
    """Read an answer. Null, text, booleans, lists, NaN and infinities are no numbers.

    Args:
        body: As it arrived.
        count: Items asked about.

    Raises:
        BadReply: It is no JSON, has no ``scores``, or not one for each item; says what it is.
    """
    try:
        reply = json.loads(body.decode("utf-8"), parse_constant=NoNumber)
    except (ValueError, RecursionError) as error:
        raise BadReply("which is no JSON") from error
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise BadReply('without a list of `"scores"`')
    if len(scores) != count:
        raise BadReply(f"with {len(scores)} {_plural(len(scores), 'score')}, expected {count}")
    return [_score(entry) for entry in scores]


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen from itself alone."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def shown(value: Any, most: int = 60) -> str:
    """Say what a value of JSON is, in a few characters."""
    if isinstance(value, NoNumber):
        return value.shown
    try:
        text = json.dumps(value, ensure_ascii=False, default=lambda inner: inner.shown)
    except (RecursionError, ValueError):
        text = type(value).__name__
    return text if len(text) <= most else text[: most - 1] + "…"


def _score(entry: Any) -> float | NoNumber:
    # `bool` is an `int` to Python, and `isinstance` would let it pass.
    if type(entry) not in (int, float):
        return NoNumber(shown(entry))
    try:
        number = float(entry)
    except OverflowError:
        return NoNumber("a number too large for a float")
    return number if math.isfinite(number) else NoNumber("a number too large for a float")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _item(item: Any, place: str) -> Item:
    if not isinstance(item, dict):
        raise BadRequest(422, f"`{place}` must be an object, got {shown(item)}.")
    _refuse_unknown(item, _KEYS, f"`{place}`")
    for key in ("prompt", "response"):
        _text(item.get(key), f"{place}.{key}")
    if not isinstance(item.get("truncated", False), bool):
        raise BadRequest(422, f"`{place}.truncated` must be true or false.")
    metadata = item.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise BadRequest(422, f"`{place}.metadata` must be an object, got {shown(metadata)}.")
    return Item(
        prompt=item["prompt"],
        response=item["response"],
        messages=_messages(item.get("messages"), f"{place}.messages"),
        truncated=item.get("truncated", False),
        prompt_ids=_ids(item.get("prompt_ids"), f"{place}.prompt_ids"),
        response_ids=_ids(item.get("response_ids"), f"{place}.response_ids"),
        metadata=metadata,
    )


def _text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        raise BadRequest(422, f"`{place}` must be text, got {shown(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(422, f"`{place}` holds half of a surrogate pair.") from error


def _messages(value: Any, place: str) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise BadRequest(422, f"`{place}` must be null or turns of a chat, got {shown(value)}.")
    for i, turn in enumerate(value):
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise BadRequest(422, f"`{place}[{i}]` must have `role` and `content`.")
        for key, text in turn.items():
            _text(text, f"{place}[{i}].{key}")
    return tuple(value)


def _ids(value: Any, place: str) -> Sequence[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or any(type(entry) is not int for entry in value):
        raise BadRequest(422, f"`{place}` must be a list of whole numbers, got {shown(value)}.")
    return value


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise BadRequest(422, unknown_key_message(key[:60], known, where))


def _plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"
