"""β that follows the KL to the reference."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ppo_lightning.callbacks.controller import Controller, check_kl_coef, measured, require_bounds
from ppo_lightning.configs.checks import require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import adapted_kl_coef
from ppo_lightning.metrics import IterationStats

_MOST_HORIZONS = 4  # in one step; 5 would take β to 0


class AdaptiveKL(Controller):
    """Steer ``kl_coef`` so that KL(policy‖reference) settles at a target.

    After each iteration β is multiplied by ``1 + clip(KL / target - 1, ±0.2) · n / horizon``, n
    being the responses of the iteration. Iterations in which the KL was not measured, or the actor
    not moved (only the critic was trained, or no step was taken), leave it alone.

    Args:
        target: Wanted KL in nats per *response*; 3 to 10 are usual.
        horizon: Time constant in responses, more than a fifth of one iteration's.
        min_coef: Least β: where the KL stays below the target for long, β would shrink so far that
            it takes as long to come back.
        max_coef: Largest β.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2.
    """

    steers = ("kl_coef",)

    def __init__(
        self,
        *,
        target: float = 6.0,
        horizon: float = 10_000,
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
    ) -> None:
        require_positive("target", target)
        require_positive("horizon", horizon)
        require_bounds("min_coef", min_coef, "max_coef", max_coef)
        self.target = target
        self.horizon = horizon
        self.min_coef = min_coef
        self.max_coef = max_coef

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        check_kl_coef(pl_module, self.source, self.min_coef, self.max_coef)
        buffer = getattr(trainer.datamodule, "buffer", None)
        if buffer is None:
            return
        try:
            self._adapted(pl_module.kl.coef, kl=0.0, num_responses=buffer.num_responses)
        except ValueError as error:
            raise ConfigError(f"AdaptiveKL: {error}") from None

    @override
    def react(self, pl_module: Any, stats: IterationStats) -> None:
        found = measured(stats.kl_ref, stats.num_responses)
        if found is None or stats.actor_steps == 0:
            return
        kl, responses = found
        # The buffer may have been grown since the horizon was checked.
        counted = min(int(responses), int(_MOST_HORIZONS * self.horizon))
        coef = self._adapted(self.law_value(pl_module, "kl_coef"), kl=kl, num_responses=counted)
        side = "above" if kl > self.target else "below"
        reason = f"KL {kl:.3g} {side} target {self.target:g} nats per response"
        self.steer(pl_module, "kl_coef", min(max(coef, self.min_coef), self.max_coef), reason)

    def _adapted(self, coef: float, *, kl: float, num_responses: int) -> float:
        return adapted_kl_coef(
            coef, kl, target=self.target, horizon=self.horizon, num_responses=num_responses
        )
