"""``histograms.jsonl`` in the run's folder."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ppo_lightning.metrics import HistogramWriter, IterationStats
from ppo_lightning.modules.metrics_file import file_to_write
from ppo_lightning.modules.slices import buffer_histograms


class HistogramFile(pl.Callback):
    """Write histograms of the scores and lengths of each buffer as one line of a JSONL file.

    They are over the responses of all ranks, in at most 16 bins each; ``read_histograms`` reads the
    file. A resumed run goes on in it, without the lines of iterations that come again; a new run
    leaves an earlier run's file under another name. ``PPOModule`` adds it to its runs.

    Args:
        filename: In the run's folder.
    """

    def __init__(self, filename: str = "histograms.jsonl") -> None:
        self.filename = filename
        self._writer: HistogramWriter | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = file_to_write(trainer, self.filename)
        if path is None:
            return
        self._writer = HistogramWriter(path)
        if trainer.current_epoch > 0:
            self._writer.resume(trainer.current_epoch)

    def on_iteration_end(self, trainer: pl.Trainer, pl_module: Any, stats: IterationStats) -> None:
        """Write one iteration; called by the module when all its numbers are known."""
        if self._writer is not None:
            rows = pl_module.ledger.responses
            self._writer.write(buffer_histograms(rows, iteration=stats.iteration))
