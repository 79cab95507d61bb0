"""What makes every run safe against its end, whatever the Trainer was given."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from ppo_lightning.modules.checkpoint_files import use_checkpoint_files
from ppo_lightning.modules.interrupts import StopOnSigterm


def run_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """Make a run safe against its end: whole files, all of an iteration, and SIGTERM.

    Returns:
        Callbacks to add.
    """
    use_checkpoint_files(trainer)
    checkpointing = default_checkpointing(trainer)
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    replaced = trainer.checkpoint_callbacks if checkpointing else []
    # Lightning would take these out as well, but tell users of callbacks that they never gave.
    trainer.callbacks = [  # type: ignore[attr-defined]
        c for c in given if c not in replaced and not isinstance(c, StopOnSigterm)
    ]
    return [StopOnSigterm(), *checkpointing]


def default_checkpointing(trainer: pl.Trainer) -> list[pl.Callback]:
    """Checkpoint callback to put in the place of Lightning's own default, if that is in use.

    Lightning's default may save after validation, inside the iteration; ours saves each
    iteration's end, and keeps ``last.ckpt``.
    """
    current = trainer.checkpoint_callbacks
    if len(current) != 1 or not is_lightnings_default(current[0]):
        return []
    return [
        ModelCheckpoint(
            filename="{epoch}",
            every_n_epochs=1,
            # Lightning keeps every file but the last from being written by `fast_dev_run`.
            save_last=not trainer.fast_dev_run,  # type: ignore[attr-defined]
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
    ]
    return all(getattr(callback, name) == getattr(plain, name) for name in names)
