"""``metrics.jsonl`` in the run's folder."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from typing_extensions import override

from ppo_lightning.metrics import STEP, IterationStats, MetricsWriter, StepStats


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the folder that a run writes to. To be called on all ranks, which then agree.

    It is the logger's own (``lightning_logs/version_0``), or the Trainer's ``default_root_dir``.
    """
    return Path(trainer.log_dir or trainer.default_root_dir)


def file_to_write(trainer: pl.Trainer, name: str) -> Path | None:
    """Return a file of the run's folder on the rank that writes it. To be called on all ranks.

    None on the others, and in a trial run, which leaves nothing behind.
    """
    path = run_folder(trainer) / name
    trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
    return None if trial_run or not trainer.is_global_zero else path


class MetricsFile(pl.Callback):
    """Write what was measured in each iteration as one line of a JSONL file.

    A resumed run goes on in the file, without the lines of iterations that come again. A new run
    leaves an earlier run's file under another name. Every module of this package adds it to its
    runs; supervised ones have a line for each ``trainer.log_every_n_steps`` optimiser steps, and
    one for each validation.

    Args:
        filename: In the run's folder.
    """

    def __init__(self, filename: str = "metrics.jsonl") -> None:
        self.filename = filename
        self._writer: MetricsWriter | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = file_to_write(trainer, self.filename)
        if path is None:
            return
        steps_done = getattr(pl_module, "steps_done", None)
        if steps_done is not None:
            self._writer, done = MetricsWriter(path, axis=STEP), int(steps_done)
        else:
            self._writer, done = MetricsWriter(path), trainer.current_epoch
        if done > 0:
            self._writer.resume(done if steps_done is None else done + 1)

    def on_iteration_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stats: IterationStats
    ) -> None:
        """Write one iteration; called by the module when all its numbers are known."""
        if self._writer is not None:
            journal = getattr(getattr(pl_module, "controls", None), "journal", ())
            changes = [entry for entry in journal if entry["iteration"] == stats.iteration]
            self._writer.write(stats, changes)

    def on_step_stats(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stats: StepStats
    ) -> None:
        """Write a row of a supervised run; called by the module."""
        if self._writer is not None:
            self._writer.write(stats)
