"""What a reward server is told of each response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_lightning.errors import RewardError, unknown_key_message
from ppo_lightning.rewards.contract import SentField, encode_request
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions

_COLUMNS: dict[SentField, str] = {
    "prompt": "prompts",
    "messages": "messages",
    "response": "responses",
    "truncated": "truncated",
    "prompt_ids": "prompt_ids",
    "response_ids": "response_ids",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Args:
        body: What is sent.
        count: Items in it.
        start: Number of its first item in the batch.
    """

    body: bytes
    count: int
    start: int


def requests_of(
    completions: Completions,
    *,
    fields: Sequence[SentField],
    send_metadata: bool | Sequence[str],
    batch_size: int,
) -> list[Request]:
    """Put responses into requests, in their order.

    Args:
        completions: To score.
        fields: What is sent of each.
        send_metadata: Fields of the prompt's record to send; true for all that JSON can hold.
        batch_size: Most responses in one request.

    Raises:
        RewardError: A record lacks such a field, or it has no form in JSON; names the sample.
    """
    items = [_item(completions, i, fields, send_metadata) for i in range(len(completions))]
    starts = range(0, len(items), batch_size)
    parts = [items[start : start + batch_size] for start in starts]
    return [
        Request(body=encode_request(part), count=len(part), start=start)
        for start, part in zip(starts, parts, strict=True)
    ]


def _item(
    completions: Completions,
    i: int,
    fields: Sequence[SentField],
    send_metadata: bool | Sequence[str],
) -> dict[str, Any]:
    item: dict[str, Any] = {
        field: _plain(getattr(completions, _COLUMNS[field])[i]) for field in fields
    }
    record = completions.metadata[i]
    if isinstance(send_metadata, bool):
        if send_metadata:
            item["metadata"] = {str(k): v for k, v in record.items() if _has_a_form(v)}
    elif send_metadata:
        item["metadata"] = {key: _wanted(completions, i, key) for key in send_metadata}
    return item


def _wanted(completions: Completions, i: int, key: str) -> Any:
    record = completions.metadata[i]
    if key not in record:
        problem = unknown_key_message(key, map(str, record), "the prompt's record")
    elif not _has_a_form(record[key]):
        problem = f"`{key}` of the prompt's record has no form in JSON."
    else:
        return record[key]
    raise RewardError(f"`send_metadata`: {problem} {quoted(completions, i)}", sample=i)


def _plain(value: Any) -> Any:
    """Return a field as JSON has it."""
    if isinstance(value, str | bool) or value is None:
        return value
    return [dict(one) if isinstance(one, Mapping) else int(one) for one in value]


def _has_a_form(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
