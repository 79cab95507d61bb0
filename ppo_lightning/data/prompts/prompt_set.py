"""A set of prompts ready for sampling, in memory, and the order it is gone through."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from ppo_lightning.data.prompts.feeds import Keys, Prompt, PromptFeed
from ppo_lightning.data.prompts.identity import Likeness, prompt_key
from ppo_lightning.data.prompts.limits import Limited, Overlong
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.prompts.reader import PromptReader, distinct
from ppo_lightning.data.prompts.rendering import Chat, Tokenizer
from ppo_lightning.data.prompts.sources import PromptSource
from ppo_lightning.errors import DataError
from ppo_lightning.functional.random import combine_keys, hash_uniform
from ppo_lightning.types import PromptRecord

__all__ = ["Overlong", "PromptSet", "shuffled_order"]

log = logging.getLogger(__name__)

_ORDER = 0x6F72646572  # keeps the keys of this order apart from those of sampled tokens


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
class PromptSet(PromptFeed):
    """Prompts that are rendered, tokenised and within the length limit; see ``build``.

    Args:
        records: The prompts as text.
        ids: Their token ids, none empty.
        num_skipped: Records that the source could not use.
        num_dropped: Prompts left out because they were too long.
        num_truncated: Prompts cut to the limit.
        num_duplicates: Prompts left out because they had come before.
        identities: ``prompt_key`` of each prompt as it was read.
    """

    records: tuple[PromptRecord, ...]
    ids: tuple[tuple[int, ...], ...]
    num_skipped: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    num_duplicates: int = 0
    identities: tuple[int, ...] = ()

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
        deduplicate: Likeness | None = None,
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
            deduplicate: Leaves out prompts that came before: the same text (``exact``), or but
                for case and white space (``normalized``). None keeps them.

        Raises:
            DataError: A prompt cannot be rendered, has no tokens or is too long, or none is left.
        """
        reader = PromptReader(
            tokenizer=tokenizer,
            chat=chat,
            system_prompt=system_prompt,
            max_prompt_tokens=max_prompt_tokens,
            overlong=overlong,
            deduplicate=deduplicate,
        )
        return cls.of(source, reader)

    @classmethod
    def of(cls, source: PromptSource, reader: PromptReader) -> PromptSet:
        """Read a source by settings that stand together; see ``build``."""
        raws, num_duplicates = _wanted(source, reader)
        limited = reader.tokenized(raws)
        _report(limited, raws, reader.max_prompt_tokens)
        return cls(
            records=limited.records,
            ids=limited.ids,
            num_skipped=source.num_skipped,
            num_dropped=len(raws) - len(limited.kept),
            num_truncated=limited.num_truncated,
            num_duplicates=num_duplicates,
            identities=tuple(prompt_key(raws[number]) for number in limited.kept),
        )

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[PromptRecord, tuple[int, ...]]:
        return self.records[number], self.ids[number]

    def order(self, position: int, count: int, *, seed: int) -> list[int]:
        """Return the prompts at positions [position, position + count) of the shuffled order.

        See ``shuffled_order``.
        """
        return shuffled_order(len(self), position, count, seed=seed)

    def at(self, position: int, count: int, *, seed: int) -> list[Prompt | None]:
        """Return the prompts of a stretch of the shuffled order; see ``PromptFeed``."""
        return [self[number] for number in self.order(position, count, seed=seed)]

    def keys(self) -> Keys:
        """Numbers of the prompts by ``prompt_key``."""
        return np.array(self.identities, dtype=np.uint64)


def _wanted(source: PromptSource, reader: PromptReader) -> tuple[list[RawPrompt], int]:
    """Return the prompts of this part without duplicates, and how many of these there were."""
    part = (raw for raw in source.iterate() if reader.wants(raw))
    found = list(distinct(part, reader.deduplicate))
    raws = [raw for raw in found if raw is not None]
    if not raws and reader.keep is not None:
        raise DataError("no prompt falls into this part of the split: give more, or another share.")
    num_duplicates = len(found) - len(raws)
    if num_duplicates:
        log.warning("%d of %d prompts left out: duplicates", num_duplicates, len(found))
    return raws, num_duplicates


def _report(limited: Limited, raws: list[RawPrompt], limit: int | None) -> None:
    """Log what the length limit did.

    Raises:
        DataError: No prompt is left.
    """
    num_dropped = len(raws) - len(limited.kept)
    if num_dropped and not limited.kept:
        raise DataError(
            f"all {len(raws)} prompts are longer than `max_prompt_tokens` = {limit} and would be "
            "dropped. Raise the limit.",
            path=raws[0].origin or None,
        )
    if num_dropped:
        log.warning("%d of %d prompts dropped: over %d tokens", num_dropped, len(raws), limit)
    if limited.num_truncated:
        log.warning("%d of %d prompts cut to %d tokens", limited.num_truncated, len(raws), limit)


def _permutation(num_prompts: int, seed: int, pass_number: int) -> list[int]:
    key = int(combine_keys(seed, _ORDER, pass_number))
    keys = torch.full((num_prompts,), key, dtype=torch.long)
    numbers: list[int] = hash_uniform(keys, torch.arange(num_prompts)).argsort(stable=True).tolist()
    return numbers
