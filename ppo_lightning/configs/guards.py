"""What happens when numbers go wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require_at_least, require_fields


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Guards of the update.

    Args:
        max_skipped_steps: After this many steps in a row that were skipped, because the loss or a
            gradient was not finite, the run is rolled back (`CheckpointRollback`) or else stops.
        self_check: At the first minibatch of each iteration the ratio must be 1 to the precision
            of the run, and the sampler's log-probabilities must be the trainer's: ``warn``,
            ``error`` or ``off``.
        advice: Start-up review of the settings: ``off``, ``warn`` or ``error``.
    """

    max_skipped_steps: int = 5
    self_check: Literal["warn", "error", "off"] = "warn"
    advice: Literal["off", "warn", "error"] = "warn"

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("max_skipped_steps", self.max_skipped_steps, 1)
