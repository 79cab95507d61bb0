"""What the data modules of a fit share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


class ValidationSwitch(pl.LightningDataModule):
    """Keeps a fit from validating; afterwards the trainer is as it was."""

    _before: Any = None

    def switch_validation_off(self) -> None:
        """Set the trainer's ``limit_val_batches`` to 0 until the fit is torn down."""
        trainer: Any = self.trainer
        if trainer.limit_val_batches != 0:  # 0 may be our own, of a fit that failed
            self._before, trainer.limit_val_batches = trainer.limit_val_batches, 0

    def teardown(self, stage: str) -> None:
        """Give the trainer its setting back."""
        if stage == "fit" and self._before is not None:
            trainer: Any = self.trainer
            trainer.limit_val_batches, self._before = self._before, None
