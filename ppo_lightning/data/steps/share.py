"""A part of given examples, by a hash of their prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Part", "Share"]

Part = Literal["all", "train", "held out"]


class OfPrompt(Protocol):
    """An example that belongs to a prompt."""

    @property
    def prompt_key(self) -> int:
        """64 bits that examples of one prompt share, of ``prompt_key``."""


@dataclass(frozen=True)
class Share:
    """A part of the examples, by a hash of their prompt: one prompt is never in both.

    The rule is that of ``SplitPrompts``, so a prompt that is held out here is held out there.

    Args:
        held_out: Share of the held-out part, in [0, 1).
        part: Which part is wanted.
    """

    held_out: float = 0.0
    part: Part = "all"

    def __contains__(self, example: OfPrompt) -> bool:
        if self.part == "all":
            return True
        return (example.prompt_key < self.held_out * 2.0**64) == (self.part == "held out")
