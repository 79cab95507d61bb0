"""Hard bounds on the distance to the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.callbacks.controller import Steering, fresh_stats
from ppo_lightning.configs.checks import require, require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.stages import is_treated
from ppo_lightning.types import Verdict

Action = Literal["stop_update", "stop_run", "rollback"]
_UNITS = {"max_kl_ref": "nats per response", "max_kl_ref_per_token": "nats per token"}


class MaxKL(Steering):
    """Keep KL(policy‖reference) below a bound, or act where it is above.

    Args:
        max_kl_ref: Bound in nats per response.
        max_kl_ref_per_token: Bound in nats per token; 0.05 to 0.1 are usual. At least one of the
            two; either is enough to act.
        action: ``stop_update`` sets the bounds at which the module ends an update inside the
            iteration, as ``kl.max_kl_ref`` does. ``stop_run`` ends the run after an iteration whose
            buffer was above. ``rollback`` reports ``kl_runaway`` then, for a callback that goes
            back to a checkpoint.
    """

    def __init__(
        self,
        *,
        max_kl_ref: float | None = None,
        max_kl_ref_per_token: float | None = None,
        action: Action = "stop_update",
    ) -> None:
        given = {"max_kl_ref": max_kl_ref, "max_kl_ref_per_token": max_kl_ref_per_token}
        self.bounds = {name: bound for name, bound in given.items() if bound is not None}
        require(bool(self.bounds), "MaxKL needs `max_kl_ref` or `max_kl_ref_per_token`.")
        for name, bound in self.bounds.items():
            require_positive(name, bound)
        choices = ("stop_update", "stop_run", "rollback")
        require(action in choices, f"`action` must be one of {', '.join(choices)}, got {action!r}.")
        self.action = action
        self.steers = tuple(self.bounds) if action == "stop_update" else ()

    @override
    def check(self, trainer: Any, pl_module: Any) -> None:
        if self.action == "rollback" and not is_treated(trainer, "kl_runaway"):
            raise ConfigError(
                "`action: rollback` of MaxKL needs a callback that goes back: add "
                "`ppo_lightning.callbacks.CheckpointRollback` to `trainer.callbacks`, or choose "
                "`stop_update` or `stop_run`."
            )
        for dial in self.steers:
            if getattr(pl_module.kl, dial) is not None:
                raise ConfigError(
                    f"`kl.{dial}` ({getattr(pl_module.kl, dial)}) and `{dial}` of MaxKL "
                    f"({self.bounds[dial]}) set the same bound: keep one of them."
                )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the module's own bounds; a resumed run takes those of its config."""
        for dial in self.steers:
            self.steer(pl_module, dial, self.bounds[dial], f"bound of {self.bounds[dial]:g}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Act on the buffer of the iteration that ends."""
        stats = fresh_stats(pl_module)
        if stats is None or self.action == "stop_update":
            return
        evidence = "; ".join(self._above(stats))
        if not evidence:
            return
        if self.action == "rollback":
            self._report(pl_module, evidence, stats.iteration)
        else:
            rank_zero_info(f"MaxKL ends the run after iteration {stats.iteration}: {evidence}.")
            trainer.should_stop = True

    def _above(self, stats: IterationStats) -> Iterator[str]:
        found = {"max_kl_ref": stats.kl_ref, "max_kl_ref_per_token": stats.kl_ref_per_token}
        for name, bound in self.bounds.items():
            kl = found[name]
            if kl is not None and kl > bound:  # a nan is not
                yield f"KL {kl:.3g} above `{name}` {bound:g} {_UNITS[name]}"

    def _report(self, pl_module: Any, evidence: str, iteration: int) -> None:
        verdict = Verdict(
            illness="kl_runaway", evidence=f"{evidence}.", iteration=iteration, source=self.source
        )
        pl_module.report(verdict)
