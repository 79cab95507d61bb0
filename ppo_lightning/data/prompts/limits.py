"""The length limit of prompts: error, drop or truncate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ppo_lightning.data.prompts.rendering import Tokenizer, special_head
from ppo_lightning.errors import DataError
from ppo_lightning.types import PromptRecord

__all__ = ["Limited", "Overlong", "within_limit"]

Overlong = Literal["error", "drop", "truncate"]
Ids = tuple[int, ...]

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Limited:
    """Prompts within the limit.

    Args:
        records: The prompts as text.
        ids: Their token ids.
        kept: Which of the prompts given these are.
        num_truncated: How many of them were cut.
    """

    records: tuple[PromptRecord, ...]
    ids: tuple[Ids, ...]
    kept: tuple[int, ...]
    num_truncated: int = 0


def within_limit(
    records: Sequence[PromptRecord],
    ids: Sequence[Ids],
    tokenizer: Tokenizer,
    *,
    limit: int | None,
    overlong: Overlong,
) -> Limited:
    """Apply the length limit to prompts.

    Args:
        records: The prompts as text.
        ids: Their token ids.
        tokenizer: Of the policy.
        limit: Most tokens of a prompt; None for any number.
        overlong: A longer prompt is an ``error``, left out (``drop``) or loses its beginning
            (``truncate``).

    Raises:
        DataError: A prompt is too long and ``overlong`` is ``error``, or it is a chat and
            ``truncate`` would cut its template.
    """
    every = tuple(range(len(ids)))
    long = [] if limit is None else [number for number in every if len(ids[number]) > limit]
    if not long or limit is None:
        return Limited(tuple(records), tuple(ids), every)
    if overlong == "error":
        raise _too_long(records[long[0]], len(ids[long[0]]), limit, len(long) - 1)
    if overlong == "drop":
        kept = sorted(set(every) - set(long))
        few = tuple(records[number] for number in kept)
        return Limited(few, tuple(ids[number] for number in kept), tuple(kept))
    head = special_head(tokenizer, records[long[0]].text)
    cut_records, cut_ids = list(records), list(ids)
    for number in long:
        cut = _cut(records[number], ids[number], tokenizer, head, limit)
        cut_records[number], cut_ids[number] = cut
    return Limited(tuple(cut_records), tuple(cut_ids), every, num_truncated=len(long))


def _too_long(record: PromptRecord, tokens: int, limit: int, more: int) -> DataError:
    others = f" ({more} more are too long as well)" if more else ""
    return DataError(
        f"the prompt has {tokens} tokens, more than `max_prompt_tokens` = {limit}{others}. "
        "Raise the limit, or set `overlong` to `drop` or `truncate`.",
        path=record.origin or None,
    )


def _cut(
    record: PromptRecord, ids: Sequence[int], tokenizer: Tokenizer, head: list[int], limit: int
) -> tuple[PromptRecord, Ids]:
    """Keep BOS and the end of a plain prompt; its text becomes that of the tokens kept."""
    if record.messages is not None:
        raise DataError(
            f"the chat has {len(ids)} tokens, more than `max_prompt_tokens` = {limit}, and "
            "`overlong: truncate` would cut the head of its template. Set `overlong` to `drop` or "
            "`error`, or give plain strings with `chat: false`.",
            path=record.origin or None,
        )
    head = head if len(head) < limit else []
    tail = list(ids[len(ids) - limit + len(head) :])
    text = _decoded(tail, tokenizer)
    # A cut inside a character of several tokens leaves bytes that are no text: drop them as well.
    while text.startswith(_REPLACEMENT) and _REPLACEMENT not in record.text and len(tail) > 1:
        tail = tail[1:]
        text = _decoded(tail, tokenizer)
    return replace(record, prompt=text, text=text), (*head, *tail)


def _decoded(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))
