"""Run an update again on a dumped buffer, for debugging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ppo_lightning.rollout.base_datamodule import ValidationSwitch
from ppo_lightning.rollout.dump import DumpedBuffer, load_buffer
from ppo_lightning.rollout.loader import RolloutLoader
from ppo_lightning.types import Experience


class ReplayDataModule(ValidationSwitch):
    """Stands in for ``RolloutDataModule``: nothing is sampled, the buffer comes from a file.

    Resume from the checkpoint of the iteration before, and the update is the original one, bit for
    bit: ``--data ReplayDataModule --data.init_args.path … --ckpt_path …``.

    Args:
        path: File that the ``DumpBuffers`` callback wrote; of the same number of ranks.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.dumped: DumpedBuffer | None = None

    @property
    def seed(self) -> int:
        """Seed of the run that wrote the buffer."""
        assert self.dumped is not None
        return self.dumped.seed

    def setup(self, stage: str) -> None:
        """Read the buffer."""
        self.dumped = load_buffer(self.path)
        self.switch_validation_off()

    def train_dataloader(self) -> RolloutLoader:
        """A loader that yields the original minibatches."""
        assert self.dumped is not None
        return RolloutLoader(
            self._experience,
            num_minibatches=self.dumped.num_minibatches,
            num_epochs=self.dumped.num_epochs,
            seed=self.dumped.seed,
        )

    def val_dataloader(self) -> list[Any]:
        """Nothing: a replay is not validated."""
        return []

    def _experience(self) -> Experience:
        assert self.dumped is not None
        trainer: Any = self.trainer
        module = trainer.lightning_module
        experience = self.dumped.experience.to(module.device)
        module.begin_iteration(experience.iteration)
        if (mask := self.dumped.response_mask) is None:
            return experience
        # In the company in which the states of the original were made, dropped responses included.
        sampled = replace(experience.sequences, response_mask=mask.to(module.device))
        trunk = module.with_frozen_states(sampled).trunk
        return replace(experience, sequences=replace(experience.sequences, trunk=trunk))
