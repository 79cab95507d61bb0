"""Whether ranks of one machine average their gradients in shared memory."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.distributed import average_in_shared_memory, is_distributed


class SharedGradients(pl.Callback):
    """Average gradients in memory that all ranks of a machine see, in place of sending them.

    It is for ``ddp`` on CPUs, where DDP sends every gradient through the machine's own network and
    back. Elsewhere (GPUs, several machines, other strategies, a communication hook of your own) and
    where there is too little room in ``/dev/shm``, nothing is changed. This project's modules add
    it to every fit.

    Args:
        enabled: False leaves DDP its own way.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        suits = type(strategy) is DDPStrategy and strategy.root_device.type == "cpu"
        if not (self.enabled and suits and is_distributed()) or _has_hook(strategy):
            return
        if reason := average_in_shared_memory(strategy.model):
            rank_zero_info(f"Gradients are sent from rank to rank, not shared in memory: {reason}.")


def _has_hook(strategy: Any) -> bool:
    """Whether the user has one; Lightning leaves the strategy's own unregistered on a CPU."""
    return strategy._ddp_comm_hook is not None or bool(strategy.model._comm_hooks)
