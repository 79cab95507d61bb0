"""Faults to put into a run, and a callback that keeps its states."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from ppo_lightning.checkpointing import copied
from ppo_lightning.modules import Request
from ppo_lightning.modules.training_state import capture
from ppo_lightning.types import Verdict


class SpoiledWeights(pl.Callback):
    """Noise in the actor's weights at the end of chosen updates: the next rollout is gibberish."""

    def __init__(self, *iterations: int, size: float = 0.5) -> None:
        self.iterations, self.size = iterations, size

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        if stats.iteration not in self.iterations:
            return
        generator = torch.Generator().manual_seed(stats.iteration)
        with torch.no_grad():
            for p in module.networks.actor_parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.add_((noise * self.size).to(p.dtype))


class RateSpike(pl.Callback):
    """The actor's rate is far too high in one iteration."""

    def __init__(self, iteration: int, factor: float = 200.0) -> None:
        self.iteration, self.factor = iteration, factor

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.on_iteration_end(trainer, module, None)

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        following = 0 if stats is None else stats.iteration + 1
        if following == self.iteration:
            request = Request(
                source="fault", dial="actor_lr_factor", factor=self.factor, until=self.iteration
            )
            module.controls.request(request)


class Says(pl.Callback):
    """Reports an illness of its own at chosen iterations."""

    def __init__(self, illness: str, *iterations: int) -> None:
        self.illness, self.iterations = illness, iterations

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        now = pl_module.iteration_stats.iteration
        if now in self.iterations:
            evidence = "Someone says so."
            verdict = Verdict(
                illness=self.illness, evidence=evidence, iteration=now, source="someone"
            )
            pl_module.report(verdict)


class States(pl.Callback):
    """Copies of what training changes, by the iteration after which they were taken."""

    def __init__(self) -> None:
        self.after: dict[int, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.after[trainer.current_epoch - 1] = copied(capture(module))

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.after[stats.iteration] = copied(capture(module))


def same(one: Any, two: Any) -> bool:
    """Whether nested containers are equal, tensors bitwise."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and bool(one.equal(two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)
