"""Go back to the last healthy state when a run falls ill, and go on more carefully."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from ppo_lightning.callbacks.rollback_cuts import SOURCE, RollbackCuts, lowered, raised
from ppo_lightning.callbacks.rollback_report import RollbackReport, extremes
from ppo_lightning.callbacks.rollback_states import HealthyStates, write_last
from ppo_lightning.checkpointing import SnapshotStore, Storage, remove_leftovers
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.diagnostics import (
    ILLNESSES,
    DetectorConfig,
    against_keeping,
    all_measured_finite,
    detect,
    is_judged,
    trimmed,
)
from ppo_lightning.distributed import any_rank, is_sharded, world_size
from ppo_lightning.errors import nearest
from ppo_lightning.io import set_aside
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules import Collected
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.modules.training_state import finite_weights
from ppo_lightning.types import Verdict

_HISTORY = 100  # iterations kept for running levels and reports
_TEXT_ITERATIONS = 3

Texts = list[dict[str, Any]]


class CheckpointRollback(pl.Callback):
    """Restore the last healthy state on an illness, cut the rates, raise β, and go on.

    Its own detectors, and whatever any callback reports by ``module.report``, are acted on at the
    end of the iteration. Weights, optimiser, schedules and normalisers go back, and callbacks that
    say so (``goes_back = True``); the iteration, prompts and random numbers do not, or the same bad
    iteration would come again. Rates are cut and β is raised by every rollback anew, within bounds,
    while the former changes hold; a later rollback does not take that back. What was undone is kept
    in ``rollbacks/1`` and so on in the run's folder. The illness after the last rollback allowed
    restores the last healthy state, writes it to ``last.ckpt``, and stops the run.

    A state is on trial until the next iteration shows how it behaves: only the rollout that follows
    a bad update reveals it. So an illness that shows in rollout or validation goes back to the
    state before the newest, one of the update itself to the newest, unless no step could be taken
    from it. If a restored state falls ill at once, an older one is taken if there is one. The first
    state is that of the start. Where there are gold scores, one of the states kept is the last that
    such a score found well, and over-optimisation goes back there.

    With Adam in float32 a state takes 12 bytes a trained parameter (weights and two moments), and
    ``memory`` holds ``keep`` + 1 of them on every rank: 36 GB a billion trained parameters as
    preset. Take ``disk`` for large models.

    Counters, factors and history are part of the Trainer's checkpoints, snapshots are not. A
    resumed run finds those on disk again; with ``memory`` the state it resumes from is its first
    snapshot, so that an illness in the very next iteration cannot go further back.

    Args:
        every_n_iterations: Between snapshots.
        keep: Healthy states to keep besides the one on trial; see above for what they cost.
        storage: ``memory`` (copies on the CPU) or ``disk`` (in the run's folder).
        max_rollbacks: How often to go back before the run is stopped.
        actor_lr_factor: On the actor's rate, at each rollback.
        min_actor_lr_factor: Least product of these.
        critic_lr_factor: On the critic's rate.
        min_critic_lr_factor: Least product of these.
        kl_coef_factor: On β.
        max_kl_coef_factor: Largest product of these.
        kl_coef_from_zero: β at the first rollback of a run without penalty; None leaves it off.
        clip_range_factor: On ε; None leaves it alone.
        min_clip_range_factor: Least product of these.
        hold_iterations: How long these changes hold; None holds them for good.
        illnesses: Names of those to act on; None acts on all that are reported. One that is not in
            ``diagnostics.ILLNESSES`` is warned of.
        num_texts: Worst, and best, responses kept of an iteration.
        thresholds: Of its own detectors.
    """

    reads_weights = True  # those of ZeRO's stage 3 are not there to be read

    def __init__(
        self,
        *,
        every_n_iterations: int = 1,
        keep: int = 2,
        storage: Storage = "memory",
        max_rollbacks: int = 3,
        actor_lr_factor: float = 0.1,
        min_actor_lr_factor: float = 0.01,
        critic_lr_factor: float = 0.5,
        min_critic_lr_factor: float = 0.1,
        kl_coef_factor: float = 2.0,
        max_kl_coef_factor: float = 4.0,
        kl_coef_from_zero: float | None = 0.05,
        clip_range_factor: float | None = None,
        min_clip_range_factor: float = 0.25,
        hold_iterations: int | None = None,
        illnesses: list[str] | None = None,
        num_texts: int = 3,
        thresholds: DetectorConfig = DetectorConfig(),  # noqa: B008 (frozen)
    ) -> None:
        require_at_least("every_n_iterations", every_n_iterations, 1)
        require_at_least("keep", keep, 1)
        require(storage in ("memory", "disk"), f"`storage` must be memory or disk, got {storage}.")
        require_at_least("max_rollbacks", max_rollbacks, 0)
        require_at_least("num_texts", num_texts, 0)
        self.every_n_iterations, self.keep, self.storage = every_n_iterations, keep, storage
        self.max_rollbacks, self.illnesses = max_rollbacks, illnesses
        self.num_texts, self.thresholds = num_texts, thresholds
        self.cuts = RollbackCuts(
            lowered("actor_lr_factor", actor_lr_factor, min_actor_lr_factor)
            | lowered("critic_lr_factor", critic_lr_factor, min_critic_lr_factor)
            | raised("kl_coef", kl_coef_factor, max_kl_coef_factor)
            | lowered("clip_range", clip_range_factor, min_clip_range_factor),
            kl_coef_from_zero=kl_coef_from_zero,
            hold_iterations=hold_iterations,
        )
        self.states, self._texts = HealthyStates(), deque[Texts](maxlen=_TEXT_ITERATIONS)
        self._folder: Path | None = None
        self._forget()

    def _forget(self) -> None:
        self.num_rollbacks = 0
        self.cuts.forget()
        self.history: list[IterationStats] = []
        self.states.forget()
        self._treated: int | None = None
        self._stopped = False
        self._texts.clear()

    # ------------------------------------------------------------------ hooks

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        first, folder = trainer.current_epoch, run_folder(trainer)
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = None if trial_run else folder / "rollbacks"
        self._warn_of_unknown_names()
        if trainer.is_global_zero:  # others write their first only after it, below
            remove_leftovers([folder / "snapshots"])
        self.states.store = store = SnapshotStore(
            "memory" if trial_run else self.storage,
            keep=self.keep + 1,
            device=pl_module.device,
            folder=folder / "snapshots",
            parts=world_size() if is_sharded(pl_module) else 1,
        )
        if first == 0:
            self._forget()
            store.clear()
            if self._folder is not None and trainer.is_global_zero:
                set_aside(self._folder)
        store.drop_after(first - 1)  # of iterations that come again
        if any_rank(not store.iterations, pl_module.device):
            self.states.keep(pl_module, first - 1)

    def on_rollout_end(self, trainer: pl.Trainer, module: Any, collected: Collected) -> None:
        """Keep some texts of the buffer; called by the module."""
        if trainer.is_global_zero:
            self._texts.append(extremes(collected, module.iteration, self.num_texts))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        stats: IterationStats = pl_module.iteration_stats
        known = {verdict.illness for verdict in pl_module.verdicts}
        found = detect([*self.history, stats], self.thresholds, source=SOURCE)
        if any_rank(not finite_weights(pl_module), pl_module.device):
            evidence = "A weight is not finite after the update."
            found += (
                Verdict(
                    illness="nonfinite_update",
                    evidence=evidence,
                    iteration=stats.iteration,
                    source=SOURCE,
                ),
            )
        for verdict in found:
            if verdict.illness not in known and self._acts_on(verdict):
                pl_module.report(verdict)

    def on_diagnosis(self, trainer: pl.Trainer, module: Any, verdicts: Sequence[Verdict]) -> None:
        """Go back; called by the module on all ranks with what was reported in the iteration.

        Raises:
            CheckpointError: No snapshot can be read.
        """
        verdicts = [verdict for verdict in verdicts if self._acts_on(verdict)]
        if not verdicts:
            return
        stats: IterationStats = module.iteration_stats
        self._treated = stats.iteration
        snapshot = self.states.go_back(module, verdicts)
        back = {"before": stats.iteration, "after": snapshot.iteration}
        module.controls.note(SOURCE, "state", **back, reason=verdicts[0].evidence)
        stopping, number = self.num_rollbacks >= self.max_rollbacks, self.num_rollbacks + 1
        changes = {}
        if not stopping:
            changes = self.cuts.apply(module.controls, verdicts[0], number=number)
        report = RollbackReport(
            number=number,
            verdicts=verdicts,
            restored=snapshot.iteration,
            stretch=[s for s in (*self.history, stats) if s.iteration > snapshot.iteration],
            changes=changes,
            notes=snapshot.passed_over,
            stopped=stopping,
            texts=[r for rows in self._texts for r in rows if r["iteration"] > snapshot.iteration],
        )
        self.history = [s for s in self.history if s.iteration <= snapshot.iteration]
        self._texts.clear()
        report.publish(self._folder)
        if stopping:
            trainer.should_stop = self._stopped = True
        else:
            self.num_rollbacks += 1

    def on_iteration_end(self, trainer: pl.Trainer, module: Any, stats: IterationStats) -> None:
        """Take a snapshot of a healthy state; called by the module on all ranks."""
        if self._treated == stats.iteration:
            if self._stopped:
                write_last(trainer)
            return
        self.history = trimmed([*self.history, stats], _HISTORY)
        states = self.states
        states.on_trial = states.just_restored = None
        due = (stats.iteration + 1) % self.every_n_iterations == 0
        against = {v.illness for v in against_keeping(self.history, self.thresholds)}
        if due and all_measured_finite(stats) and not any(map(self.treats, against)):
            states.on_trial = stats.iteration if states.keep(module, stats.iteration) else None
        if is_judged(stats) and "over_optimisation" not in against:
            states.found_well()

    # ------------------------------------------------------------------ what they do

    def treats(self, illness: str) -> bool:
        """Whether it goes back on an illness."""
        return self.illnesses is None or illness in self.illnesses

    def _acts_on(self, verdict: Verdict) -> bool:
        return self.treats(verdict.illness)

    def _warn_of_unknown_names(self) -> None:
        for name in sorted({*(self.illnesses or ())} - {*ILLNESSES}):
            near = nearest(name, ILLNESSES)
            meant = f" Did you mean `{near}`?" if near else ""
            rank_zero_warn(
                f"CheckpointRollback `illnesses`: `{name}` is none that this project reports; if "
                f"no detector of yours does, it acts on nothing.{meant} Known: "
                f"{', '.join(ILLNESSES)}."
            )

    # ------------------------------------------------------------------ checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_rollbacks": self.num_rollbacks,
            "cuts": self.cuts.state_dict(),
            "history": [stats.to_log() for stats in self.history],
            "states": self.states.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._forget()
        self.num_rollbacks = int(state_dict["num_rollbacks"])
        self.cuts.load_state_dict(state_dict["cuts"])
        self.history = [IterationStats.from_log(row) for row in state_dict["history"]]
        self.states.load_state_dict(state_dict["states"])
