"""Keep the buffers of a run, so that their updates can be run again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from ppo_lightning.distributed import rank
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.rollout import DumpedBuffer, save_buffer


class DumpBuffers(pl.Callback):
    """Write ``buffers/iteration_NNNN.rankR.pt`` into the run's folder; see ``ReplayDataModule``.

    Args:
        every_n_iterations: Buffers between are not written.
    """

    def __init__(self, every_n_iterations: int = 1) -> None:
        if every_n_iterations < 1:
            raise ValueError(f"`every_n_iterations` must be at least 1, got {every_n_iterations}.")
        self.every_n_iterations = every_n_iterations

    def on_rollout_end(self, trainer: Any, pl_module: Any, collected: Any) -> None:
        """Write the buffer that was just made."""
        experience = collected.experience
        if experience.iteration % self.every_n_iterations:
            return
        loader = trainer.train_dataloader
        dumped = DumpedBuffer(
            experience=experience,
            num_minibatches=loader.num_minibatches,
            num_epochs=loader.num_epochs,
            seed=loader.seed,
            response_mask=collected.rollout.response_mask,
        )
        name = f"iteration_{experience.iteration:04d}.rank{rank()}.pt"
        save_buffer(dumped, run_folder(trainer) / "buffers" / name)
