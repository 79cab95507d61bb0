"""What a reward component is, and its place in a run's list of rewards."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_lightning.configs.checks import require, require_fields
from ppo_lightning.types import Completions

_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # it becomes a part of metric names


class Reward(ABC):
    """Scores responses, one number each. Own components subclass this.

    ``__init__`` takes the settings only; what is heavy (weights, word lists, imports of optional
    packages) waits for ``setup``, so that ``--help`` and ``--print_config`` stay instant.
    """

    @abstractmethod
    def __call__(self, completions: Completions) -> Tensor | Sequence[float]:
        """Score a batch.

        Args:
            completions: B prompts with their responses; a response may be the empty string.

        Returns:
            One finite number for each response, in their order. ``[B]``, ``[B, 1]`` or a list.
        """

    def setup(self, device: torch.device) -> None:  # noqa: B027 (optional, not abstract)
        """Load what scoring needs. May be called more than once; only the first call works.

        Args:
            device: Where models of the run live.
        """

    def fingerprint(self) -> str:
        """Digest of loaded weights, by which a resumed run notices other ones; ``""`` for none."""
        return ""

    def close(self) -> None:  # noqa: B027 (optional, not abstract)
        """Let go of what ``setup`` loaded."""


@dataclass(frozen=True, kw_only=True)
class RewardTerm:
    """One summand of the score.

    Args:
        name: Names the component in metrics and messages: letters, digits and ``_ . -``.
        component: Scores the responses.
        weight: Factor in the weighted sum; a negative one makes the component a penalty. 0 only
            watches it: it is logged, and where it gives no usable score it is missing there, which
            neither stops the run nor drops the response.
    """

    name: str
    component: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_fields(self)
        require(
            _NAME.fullmatch(self.name) is not None,
            f"`name` of a reward must be made of letters, digits and `_.-`, got {self.name!r}.",
        )
        require(
            math.isfinite(self.weight),
            f"`weight` of reward `{self.name}` must be a finite number, got {self.weight}.",
        )
