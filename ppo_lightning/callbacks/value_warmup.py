"""Iterations at the start that only the critic learns from."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ppo_lightning.callbacks.controller import Steering
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.errors import ConfigError


class ValueWarmup(Steering):
    """Train only the critic in the first iterations, so that the actor's first advantages are good.

    Args:
        num_iterations: How many; they count towards ``trainer.max_epochs``.
    """

    steers = ("train_actor",)

    def __init__(self, *, num_iterations: int) -> None:
        require_at_least("num_iterations", num_iterations, 1)
        self.num_iterations = num_iterations

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        last = trainer.max_epochs
        endless = last is None or last < 0
        if not (endless or trainer.fast_dev_run or self.num_iterations < last):
            raise ConfigError(
                f"`num_iterations` of ValueWarmup ({self.num_iterations}) must be below "
                f"`trainer.max_epochs` ({last}), or the actor is never trained."
            )
        if pl_module.ppo.advantage != "gae":
            raise ConfigError(
                f"ValueWarmup trains a critic, and `ppo.advantage: {pl_module.ppo.advantage}` has "
                "none: leave one of them out."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the actor rest; a resumed run asks for the same again, and nothing changes."""
        reason = f"only the critic is trained in the first {self.num_iterations} iterations"
        self.steer(pl_module, "train_actor", 0.0, reason, until=self.num_iterations - 1)
