"""What a stage takes at its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGES = ("load", "rollout", "reward", "scoring", "update")


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """Most memory of a stage.

    Args:
        name: One of ``STAGES``.
        parts: Bytes at that moment, by what they are of.
    """

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())
