"""A set of prompts ready for sampling: its length limit, and the order it is gone through."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ppo_lightning.data.rendering import (
    Chat,
    Tokenizer,
    render,
    special_head,
    tokenize,
    tokenize_all,
)
from ppo_lightning.data.sources import PromptSource
from ppo_lightning.errors import DataError
from ppo_lightning.functional.random import combine_keys, hash_uniform
from ppo_lightning.types import PromptRecord

__all__ = ["Overlong", "PromptSet", "render", "shuffled_order", "tokenize"]

log = logging.getLogger(__name__)

Overlong = Literal["error", "drop", "truncate"]

_ORDER = 0x6F72646572  # keeps the keys of this order apart from those of sampled tokens
_REPLACEMENT = "\ufffd"


def shuffled_order(num_prompts: int, position: int, count: int, *, seed: int) -> list[int]:
    """Return a stretch of the endless shuffled order of prompts.

    Every pass over the prompts is a permutation of its own, so each prompt comes once a pass. A
    pure function: a resumed run needs the position only, and every rank finds the same order.

    Args:
        num_prompts: Prompts in the set, at least 1.
        position: Where the stretch begins, counted from the start of the run.
        count: Its length.
        seed: Of the order.
    """
    numbers: list[int] = []
    while len(numbers) < count:
        pass_number, start = divmod(position + len(numbers), num_prompts)
        stop = start + count - len(numbers)
        numbers += _permutation(num_prompts, seed, pass_number)[start:stop]
    return numbers


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that are rendered, tokenised and within the length limit; see ``build``.

    Args:
        records: The prompts as text.
        ids: Their token ids, none empty.
        num_skipped: Records that the source could not use.
        num_dropped: Prompts left out because they were too long.
        num_truncated: Prompts cut to the limit.
    """

    records: tuple[PromptRecord, ...]
    ids: tuple[tuple[int, ...], ...]
    num_skipped: int = 0
    num_dropped: int = 0
    num_truncated: int = 0

    @classmethod
    def build(
        cls,
        source: PromptSource,
        tokenizer: Tokenizer,
        *,
        chat: Chat = "auto",
        system_prompt: str | None = None,
        max_prompt_tokens: int | None = None,
        overlong: Overlong = "error",
    ) -> PromptSet:
        """Read a source and make it ready for sampling.

        Args:
            source: Where the prompts are.
            tokenizer: The policy's.
            chat: Whether plain strings become a user turn; see ``render``.
            system_prompt: First turn of chats that have no system turn.
            max_prompt_tokens: Most tokens of a prompt, template and BOS included.
            overlong: A longer prompt is an ``error``, left out and counted (``drop``), or loses
                its beginning (``truncate``): its end, record and text are then all the prompt
                there is. Chats are not truncated, which would cut their template.

        Raises:
            DataError: A prompt cannot be rendered, has no tokens or is too long, or none is left.
        """
        records = [
            render(raw, tokenizer, chat=chat, system_prompt=system_prompt) for raw in source.read()
        ]
        ids = tokenize_all(records, tokenizer)
        for record, tokens in zip(records, ids, strict=True):
            if not tokens:
                raise DataError("the prompt has no tokens.", path=record.origin or None)
        skipped = source.num_skipped
        whole = cls(records=tuple(records), ids=tuple(map(tuple, ids)), num_skipped=skipped)
        if max_prompt_tokens is None:
            return whole
        if max_prompt_tokens < 1:
            raise DataError(f"`max_prompt_tokens` must be at least 1, got {max_prompt_tokens}.")
        return _limited(whole, tokenizer, max_prompt_tokens, overlong)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[PromptRecord, tuple[int, ...]]:
        return self.records[number], self.ids[number]

    def order(self, position: int, count: int, *, seed: int) -> list[int]:
        """Return the prompts at positions [position, position + count) of the shuffled order.

        See ``shuffled_order``.
        """
        return shuffled_order(len(self), position, count, seed=seed)


def _limited(whole: PromptSet, tokenizer: Tokenizer, limit: int, overlong: Overlong) -> PromptSet:
    """Apply the length limit to a set."""
    long = [number for number, row in enumerate(whole.ids) if len(row) > limit]
    if not long:
        return whole
    if overlong == "error":
        raise _too_long(whole, long, limit)
    if overlong == "drop":
        return _without(whole, long, limit)
    head = special_head(tokenizer, whole.records[long[0]].text)
    records, ids = list(whole.records), list(whole.ids)
    for number in long:
        records[number], ids[number] = _cut(records[number], ids[number], tokenizer, head, limit)
    log.warning("%d of %d prompts cut to %d tokens", len(long), len(whole), limit)
    return replace(whole, records=tuple(records), ids=tuple(ids), num_truncated=len(long))


def _too_long(whole: PromptSet, long: Sequence[int], limit: int) -> DataError:
    record, tokens = whole[long[0]]
    others = f" ({len(long) - 1} more are too long as well)" if len(long) > 1 else ""
    return DataError(
        f"the prompt has {len(tokens)} tokens, more than `max_prompt_tokens` = {limit}{others}. "
        "Raise the limit, or set `overlong` to `drop` or `truncate`.",
        path=record.origin or None,
    )


def _without(whole: PromptSet, long: Sequence[int], limit: int) -> PromptSet:
    if len(long) == len(whole):
        raise DataError(
            f"all {len(whole)} prompts are longer than `max_prompt_tokens` = {limit} and would be "
            "dropped. Raise the limit.",
            path=whole.records[0].origin or None,
        )
    kept = sorted(set(range(len(whole))) - set(long))
    log.warning("%d of %d prompts dropped: over %d tokens", len(long), len(whole), limit)
    return replace(
        whole,
        records=tuple(whole.records[number] for number in kept),
        ids=tuple(whole.ids[number] for number in kept),
        num_dropped=len(long),
    )


def _cut(
    record: PromptRecord, ids: Sequence[int], tokenizer: Tokenizer, head: list[int], limit: int
) -> tuple[PromptRecord, tuple[int, ...]]:
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


def _permutation(num_prompts: int, seed: int, pass_number: int) -> list[int]:
    key = int(combine_keys(seed, _ORDER, pass_number))
    keys = torch.full((num_prompts,), key, dtype=torch.long)
    numbers: list[int] = hash_uniform(keys, torch.arange(num_prompts)).argsort(stable=True).tolist()
    return numbers
