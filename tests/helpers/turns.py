"""A callback that turns a dial at chosen moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from ppo_lightning.modules import Request


class Turns(pl.Callback):
    """Asks for values of a dial, and keeps nothing: a resumed run asks for the same.

    Args:
        dial: Its name.
        at: Iteration to the value that is asked for at its end.
        after_rollout: Iteration to the value that is asked for once its buffer is sampled.
    """

    def __init__(
        self,
        dial: str,
        at: Mapping[int, float] | None = None,
        *,
        after_rollout: Mapping[int, float] | None = None,
    ) -> None:
        self.dial, self.at, self.after_rollout = dial, at or {}, after_rollout or {}

    def on_rollout_end(self, trainer: Any, module: Any, collected: Any) -> None:
        self._ask(module, self.after_rollout)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._ask(pl_module, self.at)

    def _ask(self, module: Any, values: Mapping[int, float]) -> None:
        if (value := values.get(module.controls.iteration)) is not None:
            request = Request(source="test", dial=self.dial, value=value, reason="told to")
            module.controls.request(request)
