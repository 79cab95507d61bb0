"""What happens to scores between the components and the token rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_choices,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class RewardProcessing:
    """Order: weighted sum -> penalties -> normalise -> clip.

    Args:
        missing_eos_penalty: Subtracted where a response ended without an end token.
        overlong_penalty: Subtracted in full from ``overlong_tokens[1]`` tokens on, not at all up to
            ``overlong_tokens[0]``, and in proportion between.
        overlong_tokens: Where that penalty begins and where it is full, in response tokens.
        mask_truncated: Leave responses without an end token out of the losses.
        normalize: ``none``, or ``batch`` z-scores over all responses of the iteration (this
            changes the meaning of the KL coefficient: β_eff = β · spread).
        clip: Scores are clipped to ± this; None turns it off.
        on_nonfinite: A NaN or infinite score is an ``error``, or the response is left out of the
            buffer and counted (``drop``). That of a reward of weight 0 does neither.
    """

    missing_eos_penalty: float = 0.0
    overlong_penalty: float = 0.0
    overlong_tokens: tuple[int, int] | None = None
    mask_truncated: bool = False
    normalize: Literal["none", "batch"] = "none"
    clip: float | None = 10.0
    on_nonfinite: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least("missing_eos_penalty", self.missing_eos_penalty, 0)
        require_at_least("overlong_penalty", self.overlong_penalty, 0)
        require_positive("clip", self.clip)
        start, end = self.overlong_tokens or (0, 1)
        require(
            0 <= start < end,
            f"`overlong_tokens` must be two rising token counts, got {self.overlong_tokens}.",
        )
        require(
            self.overlong_penalty == 0 or self.overlong_tokens is not None,
            "`overlong_penalty` needs `overlong_tokens: [start, end]`.",
        )
