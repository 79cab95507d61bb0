"""The config of a run, saved in its folder, with those of earlier runs kept."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from ppo_lightning.io import set_aside


class KeepConfigs(SaveConfigCallback):
    """Save ``config.yaml``; one that is there already becomes ``config.1.yaml`` and so on."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # on all ranks: it is agreed between them
        if trainer.is_global_zero and not self.already_saved:
            set_aside(Path(folder or ".") / self.config_filename)
        super().setup(trainer, pl_module, stage)
