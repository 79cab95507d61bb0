"""What engines share that sample outside the trainer's process, while it does something else."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.rollout.engines.base import RolloutEngine, StopRules
from ppo_lightning.types import PromptBatch, Rollout


class BackgroundEngine(RolloutEngine):
    """Takes the weights and a task, and samples in the background; one task at a time.

    ``generate`` samples here and now, with the weights that it is given.

    Attributes:
        ahead: Updates that its buffers are ahead of the training: 1, or 0 to wait for each.
    """

    ahead: int = 1

    @abstractmethod
    def begin(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        policy_version: int,
    ) -> None:
        """Hand over the weights and prompts; returns once the weights have arrived.

        Args:
            model: Its weights may change as soon as this returns.
            prompts: Left-padded, a row for each response wanted.
            sampling: Settings; the temperature is recorded in the result, as the version is.
            stops: End tokens and padding.
            policy_version: Of these weights; recorded in the result.

        Raises:
            RolloutError: They did not arrive, or a task is under way.
        """

    @abstractmethod
    def finish(self) -> Rollout:
        """Wait for the answers to the prompts that were handed over.

        Raises:
            RolloutError: They did not come.
        """
