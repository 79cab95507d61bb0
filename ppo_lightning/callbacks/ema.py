"""A running average of the actor's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from ppo_lightning.checkpointing import EMA_STATE
from ppo_lightning.configs.checks import require
from ppo_lightning.distributed import placed_like
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import trained_weights


class ActorEMA(pl.Callback):
    """Average the actor's weights over the run (exponential moving average).

    The average lags behind and jumps less than the weights that are trained, which it leaves alone:
    rollouts and updates never see it. Checkpoints hold both; ``ppo-lightning export --ema`` writes
    the average. With adapters it is the adapter's weights that are averaged.

    It is brought up to date once an iteration, after the update, as if the weights of the
    iteration's end had been there for all its steps. So ``decay`` is per optimiser step of
    the actor, as published ones are, and an update that was cut short counts for less, but the cost
    is that of one look at the weights an iteration.

    Args:
        decay: Share of the average that one step keeps, in (0, 1): 0.99 averages over about the
            last 100 optimiser steps of the actor.
        validate: Whether the average answers the held-out prompts (``val/…``, ``test``,
            ``predict``) in the actor's place, so that what is measured is what ``--ema`` exports.
    """

    goes_back = True  # with a rollback: the average would remember the weights that were undone

    reads_weights = True  # those of ZeRO's stage 3 are not there to be read

    def __init__(self, *, decay: float = 0.99, validate: bool = True) -> None:
        require(0 < decay < 1, f"`decay` must lie in (0, 1), got {decay}.")
        self.decay = decay
        self.validate = validate
        self._average: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # the actor's, while the average is in its place
        self._depth = 0  # validations and exports that are under way, one inside the other

    @property
    @override
    def state_key(self) -> str:
        return EMA_STATE

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._average), "validated": self.validate}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["weights"])

    # ------------------------------------------------------------------ averaging

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.current_epoch == 0:
            self._average = {}  # of an earlier run with this object

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        weights = trained_weights(pl_module.networks.actor)
        if not self._average:
            self._average = {name: _finer(weight).clone() for name, weight in weights.items()}
        self._require_fit(weights)
        self._average = {
            name: placed_like(average, weights[name]) for name, average in self._average.items()
        }

    def after_going_back(self, module: Any) -> None:
        """Put the average that a rollback has restored to where the weights lie."""
        weights = trained_weights(module.networks.actor)
        self._average = {n: placed_like(part, weights[n]) for n, part in self._average.items()}

    def on_update_end(self, trainer: pl.Trainer, module: Any, stats: Any) -> None:
        """Take the iteration's steps in; called by the module on all ranks, which agree."""
        steps = stats.actor_steps or 0.0
        if steps == 0:
            return
        share = 1.0 - self.decay**steps
        # New tensors, so that whoever holds an earlier `state_dict` holds what it was.
        self._average = {
            name: torch.lerp(self._average[name], _finer(weight), share)
            for name, weight in trained_weights(module.networks.actor).items()
        }

    # ------------------------------------------------------------------ held-out answers

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_in(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_out(pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_in(pl_module)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_out(pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_in(pl_module)

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap_out(pl_module)

    def on_export_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Let the average be exported if it is what was validated; called by the module."""
        self._swap_in(module)

    def on_export_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Put the actor's own weights back; called by the module."""
        self._swap_out(module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._depth = min(self._depth, 1)
        self._swap_out(pl_module)

    @torch.no_grad()
    def _swap_in(self, module: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not (self.validate and self._average):
            return
        weights = trained_weights(module.networks.actor)
        self._require_fit(weights)
        self._own = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.copy_(placed_like(self._average[name], weight))

    @torch.no_grad()
    def _swap_out(self, module: Any) -> None:
        """Put the actor's own weights back, if they are out and nobody else wants the average."""
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        own, self._own = self._own, {}
        for name, weight in trained_weights(module.networks.actor).items() if own else ():
            weight.copy_(own[name])

    def _require_fit(self, weights: Mapping[str, Tensor]) -> None:
        """The average of another model would be taken for this one's.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        saved = {name: average.shape for name, average in self._average.items()}
        wanted = {name: weight.shape for name, weight in weights.items()}
        if saved != wanted:
            name = min({*saved.items()} ^ {*wanted.items()})[0]
            raise CheckpointError(
                f"The average of ActorEMA in the checkpoint does not fit the actor: `{name}` "
                "differs. Use the settings of `policy` that it was trained with."
            )


def _finer(weight: Tensor) -> Tensor:
    """At least float32: a step of 1 % of a small change is lost in anything coarser."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
