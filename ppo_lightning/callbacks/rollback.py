"""Go back to the last healthy state when a run falls ill, and go on more carefully."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.callbacks.rollback_report import RollbackReport, extremes
from ppo_lightning.checkpointing import Snapshot, SnapshotStore, Storage
from ppo_lightning.configs.checks import require, require_at_least, require_positive
from ppo_lightning.diagnostics import (
    UPDATE_ILLNESSES,
    DetectorConfig,
    all_measured_finite,
    detect,
    trimmed,
)
from ppo_lightning.distributed import any_rank
from ppo_lightning.io import set_aside
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules import Collected, Request
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.modules.training_state import all_finite, capture, finite_weights, restore
from ppo_lightning.types import Verdict

SOURCE = "CheckpointRollback"
_HISTORY = 100  # iterations kept for running levels and reports
_TEXT_ITERATIONS = 3


class CheckpointRollback(pl.Callback):
    """Restore the last healthy state on an illness, cut the rates, raise β, and go on.

    Its own detectors, and whatever any callback reports by ``module.report``, are acted on at the
    end of the iteration. Weights, optimiser, schedules and normalisers go back, and callbacks that
    say so (``goes_back = True``); the iteration, prompts and random numbers do not, or the same bad
    iteration would come again. Rates are cut and β is raised by every rollback anew, within bounds;
    a later rollback does not take that back. What was undone is kept in ``rollbacks/1`` and so on
    in the run's folder. The illness after the last rollback allowed restores the last healthy state
    and stops the run.

    A state is on trial until the next iteration shows how it behaves: only the rollout that follows
    a bad update reveals it. So an illness that shows in rollout or validation goes back to the
    state before the newest, one of the update itself to the newest. If a restored state falls ill
    at once, an older one is taken if there is one. The first state is that of the start.

    Counters, factors and history are part of the Trainer's checkpoints, snapshots are not. A
    resumed run finds those on disk again; with ``memory`` the state it resumes from is its first
    snapshot, so that an illness in the very next iteration cannot go further back.

    Args:
        every_n_iterations: Between snapshots.
        keep: Healthy states to keep besides the one on trial.
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
        illnesses: Names of those to act on; None acts on all that are reported.
        num_texts: Worst, and best, responses kept of an iteration.
        thresholds: Of its own detectors.
    """

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
        require_at_least("hold_iterations", hold_iterations, 1)
        require_positive("kl_coef_from_zero", kl_coef_from_zero)
        self.every_n_iterations, self.keep, self.storage = every_n_iterations, keep, storage
        self.max_rollbacks, self.hold_iterations = max_rollbacks, hold_iterations
        self.kl_coef_from_zero, self.illnesses = kl_coef_from_zero, illnesses
        self.num_texts, self.thresholds = num_texts, thresholds
        self._cuts = _lowered("actor_lr_factor", actor_lr_factor, min_actor_lr_factor)
        self._cuts |= _lowered("critic_lr_factor", critic_lr_factor, min_critic_lr_factor)
        self._cuts |= _raised("kl_coef", kl_coef_factor, max_kl_coef_factor)
        self._cuts |= _lowered("clip_range", clip_range_factor, min_clip_range_factor)
        self._store: SnapshotStore | None = None
        self._folder: Path | None = None
        self._texts: deque[list[dict[str, Any]]] = deque(maxlen=_TEXT_ITERATIONS)
        self._forget()

    def _forget(self) -> None:
        self.num_rollbacks = 0
        self.factors = dict.fromkeys(self._cuts, 1.0)
        self.history: list[IterationStats] = []
        self._on_trial: int | None = None
        self._just_restored: int | None = None
        self._without_penalty = False
        self._treated: int | None = None
        self._texts.clear()

    # ------------------------------------------------------------------ hooks

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        first, folder = trainer.current_epoch, run_folder(trainer)
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        self._folder = None if trial_run else folder / "rollbacks"
        self._store = SnapshotStore(
            "memory" if trial_run else self.storage,
            keep=self.keep + 1,
            device=pl_module.device,
            folder=folder / "snapshots",
        )
        if first == 0:
            self._forget()
            self._store.clear()
            if self._folder is not None and trainer.is_global_zero:
                set_aside(self._folder)
        self._store.drop_after(first - 1)  # of iterations that come again
        if any_rank(not self._store.iterations, pl_module.device):
            self._keep(pl_module, first - 1)

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
        snapshot = self._go_back(module, verdicts)
        stopping = self.num_rollbacks >= self.max_rollbacks
        report = RollbackReport(
            number=self.num_rollbacks + 1,
            verdicts=verdicts,
            restored=snapshot.iteration,
            stretch=[s for s in (*self.history, stats) if s.iteration > snapshot.iteration],
            changes={} if stopping else self._cut(module, verdicts[0]),
            notes=snapshot.passed_over,
            stopped=stopping,
            texts=[r for rows in self._texts for r in rows if r["iteration"] > snapshot.iteration],
        )
        self.history = [s for s in self.history if s.iteration <= snapshot.iteration]
        self._texts.clear()
        self._publish(trainer, report)
        if stopping:
            trainer.should_stop = True
        else:
            self.num_rollbacks += 1

    def on_iteration_end(self, trainer: pl.Trainer, module: Any, stats: IterationStats) -> None:
        """Take a snapshot of a healthy state; called by the module on all ranks."""
        if self._treated == stats.iteration:
            return
        self.history = trimmed([*self.history, stats], _HISTORY)
        self._on_trial = self._just_restored = None
        due = (stats.iteration + 1) % self.every_n_iterations == 0
        near = detect(self.history, self.thresholds.tightened())
        if due and all_measured_finite(stats) and not any(map(self._acts_on, near)):
            self._on_trial = stats.iteration if self._keep(module, stats.iteration) else None

    # ------------------------------------------------------------------ what they do

    def treats(self, illness: str) -> bool:
        """Whether it goes back on an illness."""
        return self.illnesses is None or illness in self.illnesses

    def _acts_on(self, verdict: Verdict) -> bool:
        return self.treats(verdict.illness)

    def _keep(self, module: Any, iteration: int) -> bool:
        assert self._store is not None
        state = capture(module)
        if any_rank(not all_finite(state), module.device):
            return False
        return self._store.put(iteration, state)

    def _go_back(self, module: Any, verdicts: Sequence[Verdict]) -> Snapshot:
        """Restore the newest state that is not suspected."""
        assert self._store is not None
        suspects = {self._just_restored}
        if any(verdict.illness not in UPDATE_ILLNESSES for verdict in verdicts):
            suspects.add(self._on_trial)
        while len(kept := self._store.iterations) > 1 and kept[-1] in suspects:
            self._store.drop_after(kept[-2])
        snapshot = self._store.latest()
        self._store.drop_after(snapshot.iteration)
        restore(module, snapshot.state)
        self._on_trial, self._just_restored = None, snapshot.iteration
        return snapshot

    def _cut(self, module: Any, verdict: Verdict) -> dict[str, tuple[float, float]]:
        """Ask for lower rates and a higher β; returns values before and after by dial."""
        controls = module.controls
        before = {dial: controls[dial] for dial in self._cuts}
        if self.factors["kl_coef"] == 1 and before["kl_coef"] == 0:
            self._without_penalty = self.kl_coef_from_zero is not None
        hold = self.hold_iterations
        until = None if hold is None else verdict.iteration + hold
        reason = f"rollback {self.num_rollbacks + 1}, {verdict.illness}: {verdict.evidence}"
        for dial, (factor, bound) in self._cuts.items():
            total = self.factors[dial] * factor
            self.factors[dial] = min(total, bound) if dial == "kl_coef" else max(total, bound)
            value = None
            if dial == "kl_coef" and self._without_penalty:
                value = (self.kl_coef_from_zero or 0.0) * self.factors[dial] / factor
            request = Request(
                source=SOURCE,
                dial=dial,
                value=value,
                factor=self.factors[dial] if value is None else None,
                layer="safety",
                until=until,
                reason=reason,
            )
            controls.request(request)
        return {dial: (before[dial], controls[dial]) for dial in self._cuts}

    def _publish(self, trainer: pl.Trainer, report: RollbackReport) -> None:
        """Print and write a report, the first rank alone."""
        rank_zero_info(report.text() if report.stopped else report.headline())
        for note in report.notes:
            rank_zero_info(note)
        if self._folder is None or not trainer.is_global_zero:
            return
        folder = self._folder / str(report.number)
        try:
            report.write(folder)
        except OSError as error:
            warnings.warn(f"`{folder}` could not be written: {error}.", stacklevel=2)

    # ------------------------------------------------------------------ checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "num_rollbacks": self.num_rollbacks,
            "factors": dict(self.factors),
            "history": [stats.to_log() for stats in self.history],
            "on_trial": self._on_trial,
            "just_restored": self._just_restored,
            "without_penalty": self._without_penalty,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._forget()
        self.num_rollbacks = int(state_dict["num_rollbacks"])
        self.factors |= {k: v for k, v in state_dict["factors"].items() if k in self.factors}
        self.history = [IterationStats.from_log(row) for row in state_dict["history"]]
        self._on_trial = state_dict["on_trial"]
        self._just_restored = state_dict["just_restored"]
        self._without_penalty = bool(state_dict["without_penalty"])


def _lowered(dial: str, factor: float | None, least: float) -> dict[str, tuple[float, float]]:
    """Factor and bound of a dial that goes down; nothing where it stays."""
    name = f"{dial.removesuffix('_factor')}_factor"
    for argument, value in ((name, factor), (f"min_{name}", least)):
        in_range = value is None or 0 < value <= 1
        require(in_range, f"`{argument}` must lie in (0, 1], got {value}.")
    return {} if factor is None else {dial: (factor, least)}


def _raised(dial: str, factor: float, most: float) -> dict[str, tuple[float, float]]:
    """Factor and bound of a dial that goes up."""
    require_at_least(f"{dial}_factor", factor, 1.0)
    require_at_least(f"max_{dial}_factor", most, 1.0)
    return {dial: (factor, most)}
