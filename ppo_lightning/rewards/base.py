"""What a reward component is, and its place in a run's list of rewards."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_lightning.configs import Constraint, WeightSchedule
from ppo_lightning.configs.checks import require, require_fields
from ppo_lightning.functional import ramp
from ppo_lightning.types import Completions

_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # it becomes a part of metric names


@dataclass(frozen=True)
class TokenRewards:
    """A component's answer where each token has a reward of its own.

    A type of its own, so that a list of lists is never taken for it, nor ``[B, 1]`` scores.

    Args:
        rows: For each response a number for each of its tokens, in their order: as many as
            ``Completions.response_ids`` has for it, the end token included and no padding. B lists,
            tuples, arrays or tensors.
    """

    rows: Sequence[Tensor | Sequence[float]]


class Reward(ABC):
    """Scores responses, or their tokens. Own components subclass this.

    ``__init__`` takes the settings only; what is heavy (weights, word lists, imports of optional
    packages) waits for ``setup``, so that ``--help`` and ``--print_config`` stay instant.
    """

    @abstractmethod
    def __call__(self, completions: Completions) -> Tensor | Sequence[float] | TokenRewards:
        """Score a batch.

        Args:
            completions: B prompts with their responses; a response may be the empty string.

        Returns:
            One finite number for each response, in their order: ``[B]``, ``[B, 1]`` or a list. Or
            ``TokenRewards``, one number for each token of each response.
        """

    def setup(self, device: torch.device) -> None:  # noqa: B027 (optional, not abstract)
        """Load what scoring needs. May be called more than once; only the first call works.

        Args:
            device: Where models of the run live.
        """

    def sharded_networks(self) -> Sequence[nn.Module]:
        """Networks whose weights may lie in shards: they are put together before it is asked."""
        return ()

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
            neither stops the run nor drops the response. Or a schedule, for a weight that moves
            from one number to another.
        constraint: Hold the component's mean at a bound, in place of a weight.
    """

    name: str
    component: Reward
    weight: float | WeightSchedule = 1.0
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require(
            _NAME.fullmatch(self.name) is not None,
            f"`name` of a reward must be made of letters, digits and `_.-`, got {self.name!r}.",
        )
        scheduled = isinstance(self.weight, WeightSchedule)
        require(
            isinstance(self.weight, WeightSchedule) or math.isfinite(self.weight),
            f"`weight` of reward `{self.name}` must be a finite number, got {self.weight}.",
        )
        require(
            self.constraint is None or (not scheduled and self.weight == 1),
            f"`weight` of reward `{self.name}` must be left out: with a `constraint`, the "
            "multiplier is its weight.",
        )

    def weight_at(self, iteration: int | None) -> float:
        """Return the weight of one iteration; None takes the one that a schedule ends at.

        That of a constraint is the pipeline's to know.
        """
        if not isinstance(self.weight, WeightSchedule):
            return self.weight
        plan = self.weight
        if iteration is None:
            return plan.end
        return ramp(
            iteration,
            start=plan.start,
            end=plan.end,
            length=plan.iterations,
            delay=plan.delay,
            kind=plan.kind,
        )
