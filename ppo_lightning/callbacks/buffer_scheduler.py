"""Fewer passes or a larger buffer where updates are often stopped."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import override

from ppo_lightning.callbacks.controller import Controller, measured
from ppo_lightning.configs.checks import require, require_at_least, require_within
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import UpdatePlan, pressure_on_update, relieved_plan
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.controls import PROMPT_FACTORS


class BufferScheduler(Controller):
    """Lower K or grow the buffer while the bound on KL(old‖new) often ends the update.

    Passes that are stopped are passes in vain. After each change the share of stopped iterations is
    counted anew; the last change is undone when there was no stop for ``patience`` iterations.

    Args:
        first: What gives way first: ``epochs`` lowers K by one at a time, ``buffer`` takes more
            prompts. At its bound the other follows.
        window: Iterations that the share of stopped ones is taken over.
        frequent: Share from which on stops are frequent.
        patience: Iterations without a stop after which a change is undone; at least ``window``.
        min_epochs: Least K.
        growth: Factor of one step of the buffer.
        max_factor: Largest factor on ``buffer.num_prompts``.
    """

    steers = ("num_update_epochs", "num_prompts_factor")

    def __init__(
        self,
        *,
        first: Literal["epochs", "buffer"] = "epochs",
        window: int = 5,
        frequent: float = 0.6,
        patience: int = 10,
        min_epochs: int = 1,
        growth: float = 2.0,
        max_factor: float = 4.0,
    ) -> None:
        choices = ("epochs", "buffer")
        require(first in choices, f"`first` must be one of {choices}, got {first!r}.")
        require_at_least("window", window, 1)
        require(0 < frequent <= 1, f"`frequent` must lie in (0, 1], got {frequent}.")
        require_at_least("patience", patience, window)
        require_at_least("min_epochs", min_epochs, 1)
        require(1 < growth <= PROMPT_FACTORS[1], f"`growth` must be above 1, got {growth}.")
        require_within("max_factor", max_factor, 1, PROMPT_FACTORS[1])
        self.first = first
        self.window = window
        self.frequent = frequent
        self.patience = patience
        self.min_epochs = min_epochs
        self.growth = growth
        self.max_factor = max_factor
        self._stopped: list[bool] = []

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        ppo = pl_module.ppo
        if ppo.target_kl is None:
            raise ConfigError(
                "BufferScheduler follows the stops of updates, and with `ppo.target_kl: null` "
                "there are none: set it, or leave BufferScheduler out."
            )
        if self.min_epochs > ppo.num_update_epochs:
            raise ConfigError(
                f"`min_epochs` of BufferScheduler ({self.min_epochs}) is above "
                f"`ppo.num_update_epochs` ({ppo.num_update_epochs})."
            )

    @override
    def react(self, pl_module: Any, stats: IterationStats) -> None:
        if measured(stats.kl_stopped) is None:
            return
        self._stopped = [*self._stopped, bool(stats.kl_stopped)][-self.patience :]
        pressure = pressure_on_update(
            self._stopped, window=self.window, frequent=self.frequent, patience=self.patience
        )
        before = UpdatePlan(
            num_epochs=int(self.law_value(pl_module, "num_update_epochs")),
            prompts_factor=self.law_value(pl_module, "num_prompts_factor"),
        )
        after = self._next(before, pressure, pl_module.ppo.num_update_epochs)
        if after != before:
            self._change(pl_module, after, self._reason(pressure))

    def _next(self, plan: UpdatePlan, pressure: int, most_epochs: int) -> UpdatePlan:
        return relieved_plan(
            plan,
            pressure=pressure,
            num_epochs=(self.min_epochs, most_epochs),
            growth=self.growth,
            max_factor=self.max_factor,
            first=self.first,
        )

    def _reason(self, pressure: int) -> str:
        if pressure > 0:
            recent = self._stopped[-self.window :]
            return f"{sum(recent)} of {len(recent)} updates were stopped by KL(old‖new)"
        return f"no update was stopped in {len(self._stopped)} iterations"

    def _change(self, pl_module: Any, plan: UpdatePlan, reason: str) -> None:
        self.steer(pl_module, "num_update_epochs", plan.num_epochs, reason)
        self.steer(pl_module, "num_prompts_factor", plan.prompts_factor, reason)
        self._stopped = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"stopped": list(self._stopped)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stopped = list(state_dict["stopped"])
