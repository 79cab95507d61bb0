"""How old the weights may be that sampled what is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require, require_at_least, require_fields


@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """What happens to responses of older weights. Without any, nothing changes.

    The lag of a response is the number of updates between the weights that sampled it and the
    current ones; updates without a step do not count. It is 0 unless an engine samples ahead, such
    as ``AsyncEngine``. Ratios are always clipped against the current weights at buffer time.

    Args:
        max_lag: Responses with a lag above this are stale, in updates.
        on_stale: ``drop`` leaves them out of the buffer, ``resample`` samples them again with the
            current weights, ``correct`` multiplies their policy loss, token by token, by importance
            weights, and ``use`` trains on them as they are, which is biased.
        strict: Any response that is not of the current weights ends the run.
        correct_all: Weigh all responses so, stale or not: for a sampler in low precision or outside
            the trainer, whose probabilities differ.
        importance_cap: Largest importance weight, at least 1.
    """

    max_lag: int = 0
    on_stale: Literal["drop", "resample", "correct", "use"] = "correct"
    strict: bool = False
    correct_all: bool = False
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("max_lag", self.max_lag, 0)
        require_at_least("importance_cap", self.importance_cap, 1)
        require(
            not (self.strict and self.max_lag),
            f"`strict` takes responses of the current weights only: leave `max_lag` "
            f"({self.max_lag}) out.",
        )
