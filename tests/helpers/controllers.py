"""A stand-in for a run: real dials and records, and no network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ppo_lightning.configs import BufferConfig, KLConfig, PPOConfig, RewardProcessing
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.controls import Controls, ppo_dials


class StandIn:
    """What a controller reads of a module and its trainer.

    Args:
        callbacks: As in ``trainer.callbacks``.
        ppo: Settings of ``PPOConfig``.
        kl: Settings of ``KLConfig``.
        normalize: Of the reward.
        trainer: Attributes of the trainer.
    """

    def __init__(
        self,
        *callbacks: Any,
        ppo: dict[str, Any] | None = None,
        kl: dict[str, Any] | None = None,
        normalize: str = "none",
        **trainer: Any,
    ) -> None:
        self.ppo, self.kl = PPOConfig(**(ppo or {})), KLConfig(**(kl or {}))
        self.controls = Controls(ppo_dials(self.ppo, self.kl))
        processing = RewardProcessing(normalize=normalize)
        self.reward_pipeline = SimpleNamespace(processing=processing)
        self.iteration_stats: IterationStats | None = None
        self.verdicts: list[Any] = []
        settings = {
            "datamodule": SimpleNamespace(buffer=BufferConfig(num_prompts=256)),
            "max_epochs": 100,
            "fast_dev_run": False,
            "should_stop": False,
        }
        self.trainer = SimpleNamespace(callbacks=list(callbacks), **(settings | trainer))

    def report(self, verdict: Any) -> None:
        self.verdicts.append(verdict)

    def start(self) -> StandIn:
        """Call what ``fit`` calls first."""
        for hook in ("on_fit_start", "on_train_start"):
            self._call(hook)
        return self

    def end_iteration(self, iteration: int, **measured: float | None) -> None:
        """Let the callbacks react to an iteration."""
        self.controls.iteration = iteration
        self.iteration_stats = IterationStats(iteration=iteration, **measured)
        self._call("on_train_epoch_end")

    def run(self, rows: list[dict[str, float]], *, first: int = 0) -> None:
        """Let them react to iteration after iteration."""
        for iteration, row in enumerate(rows, start=first):
            self.end_iteration(iteration, **row)

    def resumed(self, *callbacks: Any) -> StandIn:
        """Return a run with the same settings, going on from this one's checkpoint."""
        other = StandIn(*callbacks, normalize=self.reward_pipeline.processing.normalize)
        other.ppo, other.kl = self.ppo, self.kl
        other.controls = Controls(ppo_dials(self.ppo, self.kl))
        other.controls.load_state_dict(self.controls.state_dict())
        for old, new in zip(self.trainer.callbacks, callbacks, strict=True):
            new.load_state_dict(old.state_dict())
        return other.start()

    def _call(self, hook: str) -> None:
        for callback in self.trainer.callbacks:
            getattr(callback, hook, lambda *_: None)(self.trainer, self)
