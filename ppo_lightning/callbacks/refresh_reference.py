"""Let the reference follow the actor, every now and then."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from ppo_lightning.configs.checks import require_at_least


class RefreshReference(pl.Callback):
    """Make the reference a frozen copy of the current actor.

    The KL to the reference begins at 0 again, so the policy may go further from where the run
    began than its penalty allows at once. What was reported as KL to the reference is then measured
    from the last refresh, and so are the reference's held-out answers.

    It happens before the rollout of an iteration. Checkpoints hold the refreshed weights (with
    adapters only the adapters), since they are no model's that could be loaded again.

    Args:
        every_n_iterations: It is due before the iterations n, 2n, … (the first is 0).
        min_gain: Only if the mean score (``rollout/raw_score_mean``) has risen by at least this
            since the last refresh, or since the first iteration, so that a policy that went astray
            does not become the reference; None refreshes always.
    """

    goes_back = True  # or a rollback would leave the reference on the policy that was undone

    reads_weights = True  # those of ZeRO's stage 3 are not there to be read

    def __init__(self, *, every_n_iterations: int, min_gain: float | None = None) -> None:
        require_at_least("every_n_iterations", every_n_iterations, 1)
        require_at_least("min_gain", min_gain, 0)
        self.every_n_iterations = every_n_iterations
        self.min_gain = min_gain
        self._forget()

    def _forget(self) -> None:
        self._due = False
        self._score: float | None = None  # at the last refresh, or in the first iteration
        self._weights: dict[str, Tensor] = {}  # the reference's own, once it was refreshed
        self._first: dict[str, Tensor] = {}  # the reference's before it was ever refreshed
        self._to_restore = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"due": self._due, "score": self._score, "weights": dict(self._weights)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._due, self._score = state_dict["due"], state_dict["score"]
        self._weights = dict(state_dict["weights"])
        self._to_restore = bool(self._weights)

    # ------------------------------------------------------------------ restoring

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.current_epoch == 0:
            self._forget()  # of an earlier run with this object

    # The module's own hooks of the same names come later: it then finds the reference, and its
    # fingerprint, as they were when the checkpoint was written.

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module: Any = pl_module
        module.reference.require_alike(module.networks.actor)
        self._restore(module)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore(pl_module)

    def _restore(self, module: Any) -> None:
        if self._to_restore:
            self._refresh(module, self._weights)
            self._to_restore = False

    def after_going_back(self, module: Any) -> None:
        """Put the reference back too; called when a rollback has restored this object's state."""
        if self._to_restore:
            self._restore(module)
        elif self._first:
            self._refresh(module, self._first)

    # ------------------------------------------------------------------ refreshing

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        """Decide on what all ranks have in common; called by the module, before it is saved."""
        score = stats.raw_score_mean
        if self._score is None:
            self._score = score
        if (stats.iteration + 1) % self.every_n_iterations == 0 and self._has_gained(score):
            self._due, self._score = True, score

    def _has_gained(self, score: float | None) -> bool:
        if self.min_gain is None:
            return True
        return None not in (score, self._score) and score - self._score >= self.min_gain  # type: ignore[operator]

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """Act before the rollout; called by the module on all ranks, which do the same."""
        if name == "rollout" and self._due:
            self._refresh(module, None)
            self._due = False
            module.controls.note("RefreshReference", "reference", reason="became the actor")
            rank_zero_info(
                f"RefreshReference: the reference is the actor as it begins {module.iteration}."
            )

    def _refresh(self, module: Any, weights: dict[str, Tensor] | None) -> None:
        actor = module.networks.actor
        if not self._first:
            self._first = module.reference.as_it_is(actor)
        module.reference.refresh(actor, weights)
        module.forget_reference_answers()
        self._weights = module.reference.taken_over(actor)
