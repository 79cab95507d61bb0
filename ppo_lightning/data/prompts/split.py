"""Training and held-out prompts of one source."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np

from ppo_lightning.data.prompts.feeds import PromptFeed
from ppo_lightning.data.prompts.identity import prompt_key
from ppo_lightning.data.prompts.prompt_set import PromptSet
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.prompts.reader import PromptReader
from ppo_lightning.data.prompts.sources import Prompts, PromptSource, as_source
from ppo_lightning.errors import DataError

__all__ = ["Part", "SplitPrompts", "warn_of_overlap"]

log = logging.getLogger(__name__)

Part = Literal["train", "validation"]


class SplitPrompts(PromptSource):
    """The training or the held-out part of a source.

    A hash of the prompt's text decides, so a prompt stays on its side when others are added or
    the file is sorted anew, and prompts that differ in case, white space or metadata only are on
    the same side.

    Args:
        source: All prompts.
        part: ``train`` or ``validation``.
        share: Of ``validation``, above 0 and below 1. With few prompts the part may be larger or
            smaller: each of them falls by itself.
        salt: Another one gives another split.
    """

    def __init__(self, source: Prompts, part: Part, share: float = 0.1, salt: str = "") -> None:
        if part not in ("train", "validation"):
            raise ValueError(f"`part` must be one of train, validation, got {part!r}.")
        if not 0 < share < 1:
            raise ValueError(f"`share` must lie above 0 and below 1, got {share}.")
        self.source = as_source(source)
        self.part = part
        self.share = share
        self.salt = salt

    def owns(self, raw: RawPrompt) -> bool:
        """Whether a prompt belongs to this part."""
        key = prompt_key(raw, likeness="normalized", salt=self.salt)
        return (key < self.share * 2.0**64) == (self.part == "validation")

    def read(self) -> list[RawPrompt]:
        """Return the prompts of this part.

        Raises:
            DataError: There are none.
        """
        found = list(self.iterate())
        if not found:
            raise DataError(
                f"no prompt falls into the {self.part} part: give more, or a larger one."
            )
        return found

    def iterate(self) -> Iterator[RawPrompt]:
        """Yield the prompts of this part; the others are read and left out."""
        yield from filter(self.owns, self.source.iterate())
        self.num_skipped = self.source.num_skipped

    def feed(self, reader: PromptReader) -> PromptFeed:
        """Return the order of this part's prompts, as the source makes it."""
        return self.source.feed(reader.narrowed(self.owns))


def warn_of_overlap(train: PromptFeed, held_out: PromptSet) -> int:
    """Count held-out prompts that are training prompts too, and log them.

    Args:
        train: Training prompts; where they are not all known (a stream that was not looked
            through), nothing is counted.
        held_out: Held-out prompts.

    Returns:
        How many there are.
    """
    known = train.keys()
    if known is None:
        return 0
    shared = np.flatnonzero(np.isin(held_out.keys(), known))
    if len(shared):
        record = held_out.records[int(shared[0])]
        log.warning(
            "%d of %d held-out prompts also stand among the training prompts, first %s: %.60r. "
            "What is measured on them is not held out. `val_share` makes a split without such.",
            len(shared),
            len(held_out),
            record.origin or "one",
            record.prompt,
        )
    return len(shared)
