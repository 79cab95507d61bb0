"""The config of a run, saved in its folder, with those of earlier runs kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from ppo_lightning.io import naming, set_aside


class KeepConfigs(SaveConfigCallback):
    """Save ``config.yaml``; one that is there already becomes ``config.1.yaml`` and so on."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # on all ranks: it is agreed between them
        path = Path(folder or ".") / self.config_filename
        if trainer.is_global_zero and not self.already_saved:
            _require_writable(path)
            set_aside(path)
        with naming(path):
            super().setup(trainer, pl_module, stage)


def _require_writable(path: Path) -> None:
    """Raise what writing the file would: jsonargparse has an error of its own for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
