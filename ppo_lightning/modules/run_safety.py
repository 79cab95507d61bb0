"""What makes every run safe against its end, whatever the Trainer was given."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from typing_extensions import override

from ppo_lightning.modules.checkpoint_files import use_checkpoint_files
from ppo_lightning.modules.interrupts import StopOnSigterm
from ppo_lightning.modules.watchdog import Watchdog

STEPS_BETWEEN_FILES = 100
"""Optimiser steps of a supervised run that a sudden end costs at most, by default."""


class KeepLast(ModelCheckpoint):
    """A file at the end of every epoch, and ``last.ckpt`` anew within long epochs.

    Args:
        every_n_steps: Steps of the optimiser, planned ones, between two files within an epoch.
        save_last: False writes none within an epoch.
    """

    def __init__(self, every_n_steps: int = STEPS_BETWEEN_FILES, *, save_last: bool = True) -> None:
        super().__init__(
            filename="{epoch}", every_n_epochs=1, save_last=save_last, save_on_train_epoch_end=True
        )
        self.every_n_steps = every_n_steps

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # After an epoch's last step comes its own file; one from here would take its place.
        if trainer.fit_loop.epoch_loop._is_training_done or pl_module.steps_done == 0:
            return
        due = pl_module.steps_done % self.every_n_steps == 0
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def run_callbacks(trainer: pl.Trainer, *, whole_at_steps: bool = False) -> list[pl.Callback]:
    """Make a run safe against its end: whole files, all of an iteration, SIGTERM, lost ranks.

    Args:
        trainer: The run's.
        whole_at_steps: Whether a run can go on from the end of any step.

    Returns:
        Callbacks to add.
    """
    use_checkpoint_files(trainer)
    checkpointing = default_checkpointing(trainer, whole_at_steps=whole_at_steps)
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    replaced = trainer.checkpoint_callbacks if checkpointing else []
    # Lightning would take these out as well, but tell users of callbacks that they never gave.
    trainer.callbacks = [  # type: ignore[attr-defined]
        c for c in given if c not in replaced and not isinstance(c, StopOnSigterm)
    ]
    return [*_watchdogs(trainer), StopOnSigterm(), *checkpointing]


def _watchdogs(trainer: pl.Trainer) -> list[pl.Callback]:
    """One for several ranks, unless the user has given one."""
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.world_size < 2 or any(isinstance(c, Watchdog) for c in given):
        return []
    return [Watchdog()]


def default_checkpointing(
    trainer: pl.Trainer, *, whole_at_steps: bool = False
) -> list[pl.Callback]:
    """Checkpoint callback to put in the place of Lightning's own default, if that is in use.

    Lightning's default may save after validation, inside the iteration; ours saves each
    iteration's end, and keeps ``last.ckpt``; within an epoch, too, where a run can go on from any
    step.
    """
    current = trainer.checkpoint_callbacks
    if len(current) != 1 or not is_lightnings_default(current[0]):
        return []
    # Lightning keeps every file but the last from being written by `fast_dev_run`.
    save_last = not trainer.fast_dev_run  # type: ignore[attr-defined]
    if whole_at_steps:
        return [KeepLast(save_last=save_last)]
    return [
        ModelCheckpoint(
            filename="{epoch}",
            every_n_epochs=1,
            save_last=save_last,
            save_on_train_epoch_end=True,
        )
    ]


def is_lightnings_default(callback: Checkpoint) -> bool:
    """Whether it is what the Trainer adds by itself: every argument at its default."""
    if type(callback) is not ModelCheckpoint:
        return False
    plain = ModelCheckpoint()
    names = [
        *("monitor", "filename", "save_last", "save_top_k", "dirpath", "save_weights_only"),
        *("_every_n_train_steps", "_every_n_epochs", "_save_on_train_epoch_end"),
        *("_train_time_interval", "save_on_exception"),
    ]
    return all(getattr(callback, name) == getattr(plain, name) for name in names)
