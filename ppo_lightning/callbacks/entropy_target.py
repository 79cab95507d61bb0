"""An entropy bonus that is as large as it has to be."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from ppo_lightning.callbacks.controller import Controller, measured
from ppo_lightning.configs.checks import require, require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import adapted_ent_coef
from ppo_lightning.metrics import IterationStats


class EntropyTarget(Controller):
    """Raise ``ent_coef`` while the policy's entropy is below a target, and let it fall above.

    Each iteration adds ``rate`` times the relative shortfall. The weight rests at the configured
    ``ppo.ent_coef``, which may be 0, and never goes below it: an entropy above the target is left
    alone.

    Args:
        target: Least entropy, in nats per token.
        relative: The same as a share of the entropy in the first iteration; one of the two.
        rate: Most that ``ent_coef`` changes in one iteration.
        max_coef: Largest ``ent_coef``. A large bonus drives the policy to noise.

    Source:
        The temperature of SAC (Haarnoja et al. 2018, arXiv:1812.05905, sec. 5), once an iteration.
    """

    steers = ("ent_coef",)

    def __init__(
        self,
        *,
        target: float | None = None,
        relative: float | None = None,
        rate: float = 1e-3,
        max_coef: float = 0.05,
    ) -> None:
        require(
            (target is None) != (relative is None),
            f"give either `target` ({target}), in nats per token, or `relative` ({relative}), a "
            "share of the first iteration's entropy.",
        )
        require_positive("target", target)
        require(
            relative is None or 0 < relative <= 1,
            f"`relative` must lie in (0, 1], got {relative}.",
        )
        require_positive("rate", rate)
        require_positive("max_coef", max_coef)
        self.target = target
        self.relative = relative
        self.rate = rate
        self.max_coef = max_coef
        self._first: float | None = None

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.ppo.ent_coef > self.max_coef:
            raise ConfigError(
                f"`ppo.ent_coef` ({pl_module.ppo.ent_coef}) is above EntropyTarget's `max_coef` "
                f"({self.max_coef}): change one of them."
            )

    @override
    def react(self, pl_module: Any, stats: IterationStats) -> None:
        found = measured(stats.entropy)
        if found is None:
            return
        [entropy] = found
        self._first = entropy if self._first is None else self._first
        target = self._first * self.relative if self.relative is not None else self.target
        if not target:  # a share of an entropy of 0
            return
        coef = adapted_ent_coef(
            self.law_value(pl_module, "ent_coef"),
            entropy,
            target=target,
            rate=self.rate,
            low=pl_module.ppo.ent_coef,
            high=self.max_coef,
        )
        side = "below" if entropy < target else "above"
        reason = f"entropy {entropy:.3g} {side} target {target:.3g} nats per token"
        self.steer(pl_module, "ent_coef", coef, reason)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first = state_dict["first"]
