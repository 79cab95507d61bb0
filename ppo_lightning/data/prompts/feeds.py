"""What the loop takes its prompts from, whether they are in memory, mixed or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ppo_lightning.errors import DataError
from ppo_lightning.types import PromptRecord

__all__ = ["Keys", "Prompt", "PromptFeed", "Taken", "TokenizedPrompts"]

Keys = NDArray[np.uint64]
Prompt = tuple[PromptRecord, tuple[int, ...]]
"""A prompt as text, and its token ids."""


class TokenizedPrompts(Protocol):
    """Prompts as text and as token ids."""

    @property
    def records(self) -> Sequence[PromptRecord]:
        """The prompts as text."""

    @property
    def ids(self) -> Sequence[Sequence[int]]:
        """Their token ids, none empty."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Prompts taken from a feed.

    Args:
        records: The prompts as text.
        ids: Their token ids.
        position: Where the next ones begin.
    """

    records: tuple[PromptRecord, ...]
    ids: tuple[tuple[int, ...], ...]
    position: int


class PromptFeed(ABC):
    """An endless order of prompts, of which the position is the whole state.

    What is taken is a pure function of position, count and seed: every rank takes the same
    prompts, and a resumed run the next ones.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Prompts in a pass."""

    @abstractmethod
    def at(self, position: int, count: int, *, seed: int) -> list[Prompt | None]:
        """Return what stands at positions [position, position + count) of the order of ``seed``.

        Returns:
            ``count`` entries, None where a prompt turned out to be unusable or too long.

        Raises:
            DataError: One is unusable or too long, and that is not to be left out.
        """

    @abstractmethod
    def keys(self) -> Keys | None:
        """Numbers of the prompts by ``prompt_key``; None where they are not known."""

    def fingerprint(self) -> tuple[int, str]:
        """Return the number of prompts in a pass and a digest of them, empty if not known.

        A position means other prompts once either has changed.
        """
        keys = self.keys()
        digest = "" if keys is None else blake2b(keys.tobytes(), digest_size=8).hexdigest()
        return len(self), digest

    def take(self, position: int, count: int, *, seed: int) -> Taken:
        """Return the next ``count`` prompts of the order of ``seed`` that are usable.

        Raises:
            DataError: As `at`; or none is usable.
        """
        found: list[Prompt] = []
        in_vain = 0
        while (missing := count - len(found)) > 0:
            stretch = self.at(position, missing, seed=seed)
            position += missing
            usable = [prompt for prompt in stretch if prompt is not None]
            found += usable
            in_vain = 0 if usable else in_vain + missing
            if in_vain >= 2 * len(self):  # at least one whole pass lies in there
                raise DataError(
                    f"none of {len(self)} prompts can be used: all of them are longer than "
                    "`max_prompt_tokens`, or unusable."
                )
        return Taken(
            records=tuple(record for record, _ in found),
            ids=tuple(ids for _, ids in found),
            position=position,
        )
