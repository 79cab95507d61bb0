"""Bring the actor back towards the reference, every now and then."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ppo_lightning.callbacks.refresh_reference import RefreshReference
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.errors import ConfigError
from ppo_lightning.models import is_adapted


class PullBack(pl.Callback):
    """Average the actor with the reference in the space of their weights.

    The actor becomes (1 − w)·actor + w·reference, which takes back part of what it drifted, while
    the critic keeps what it has learned. With adapters it is the same function that results: their
    second factor (B) is scaled by 1 − w.

    It happens before the rollout of an iteration, so what was validated and saved at the end of the
    one before is what the update made, and the run does not end on a pull-back.

    Args:
        every_n_iterations: It acts before the iterations n, 2n, … (the first is 0).
        weight: w in (0, 1]; 1 sets the actor back to the reference.
        clear_moments: Also set the optimiser's state of the actor to zero: its moments were
            gathered elsewhere.
    """

    reads_weights = True  # those of ZeRO's stage 3 are not there to be read

    def __init__(
        self, *, every_n_iterations: int, weight: float, clear_moments: bool = False
    ) -> None:
        require_at_least("every_n_iterations", every_n_iterations, 1)
        require(0 < weight <= 1, f"`weight` must lie in (0, 1], got {weight}.")
        self.every_n_iterations = every_n_iterations
        self.weight = weight
        self.clear_moments = clear_moments

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        refreshed = any(isinstance(callback, RefreshReference) for callback in callbacks)
        if refreshed and is_adapted(module.networks.actor):
            raise ConfigError(
                "PullBack and RefreshReference cannot be used together with adapters "
                "(`policy.lora`): the average of two adapters is none of their rank. Keep one."
            )
        module.reference.require_pullable(module.networks.actor)

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """Act before the rollout; called by the module on all ranks, which do the same."""
        number = module.iteration
        if name != "rollout" or number == 0 or number % self.every_n_iterations:
            return
        module.reference.pull(module.networks.actor, self.weight)
        if self.clear_moments:
            for optimizer in trainer.optimizers:
                clear_state(optimizer, "actor")
        module.controls.note(
            "PullBack", "actor", reason=f"moved to the reference by the weight {self.weight:.3g}"
        )
        rank_zero_info(f"PullBack: the actor went back by {self.weight:.3g} before {number}.")


def clear_state(optimizer: torch.optim.Optimizer, group: str) -> None:
    """Set what an optimiser remembers of one of its named groups to zero, in place."""
    for entry in optimizer.param_groups:
        for parameter in entry["params"] if entry["name"] == group else ():
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    value.zero_()
