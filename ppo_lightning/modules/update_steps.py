"""The hooks of the update: one optimiser step a minibatch, and the end of the iteration."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ppo_lightning.configs import (
    GuardConfig,
    KLConfig,
    OptimizerConfig,
    PPOConfig,
    SamplingConfig,
    StalenessConfig,
    ValidationConfig,
)
from ppo_lightning.distributed import any_rank, gather_from_ranks
from ppo_lightning.functional import adapted_penalty_coef
from ppo_lightning.metrics import IterationStats
from ppo_lightning.models import ActorCritic
from ppo_lightning.modules.controls import Controls, Request, ppo_dials
from ppo_lightning.modules.guards import SamplerCheck, SkipCounter, warn_of_idle_update
from ppo_lightning.modules.held_out_steps import HeldOutSteps
from ppo_lightning.modules.optim import advance, refresh
from ppo_lightning.modules.passes import IDLE, Part
from ppo_lightning.modules.reporting import IterationLedger, log_iteration
from ppo_lightning.modules.stages import call_listeners, is_treated, profiled
from ppo_lightning.modules.staleness import allowed_lag, compares_sampler
from ppo_lightning.modules.updater import Updater
from ppo_lightning.rollout import PolicyVersions, RolloutEngine, RolloutsAhead
from ppo_lightning.types import MiniBatch, Verdict

PENALTY = "PPO-Penalty"
_NONFINITE = "nonfinite_update"


class UpdateSteps(HeldOutSteps):
    """Takes an iteration's optimiser steps, and says what was measured when it ends.

    Args:
        validation: How held-out prompts are answered.
        ppo: The objective.
        kl: Penalty towards the reference.
        guards: What happens when numbers go wrong.
        components: Names of the reward components.
    """

    networks: ActorCritic | None
    engine: RolloutEngine
    staleness: StalenessConfig
    sampling: SamplingConfig
    optimizer_config: OptimizerConfig

    def __init__(
        self,
        validation: ValidationConfig,
        *,
        ppo: PPOConfig,
        kl: KLConfig,
        guards: GuardConfig,
        components: tuple[str, ...],
    ) -> None:
        super().__init__(validation)
        self.automatic_optimization = False
        self.ppo = ppo
        self.kl = kl
        self.guards = guards
        self.components = components
        self.checkpoint_complete = True
        self._updater: Updater | None = None

    def start_anew(self) -> None:
        """Forget what an earlier run has changed, but for the weights."""
        temperatures = self.engine.temperatures(self.sampling)
        dials = ppo_dials(self.ppo, self.kl, self.sampling, temperatures=temperatures)
        self.controls = Controls(dials)
        self.ledger = IterationLedger(self.components)
        self.skips = SkipCounter(self.guards.max_skipped_steps)
        self.sampler_check = SamplerCheck(self.guards.self_check)
        self.versions, self.ahead = PolicyVersions(), RolloutsAhead()
        self.verdicts: list[Verdict] = []
        self.stop_requested = False
        self.rested = {"actor": 0, "critic": 0}  # planned steps in which it was not to be trained
        self.entropy_start: float | None = None
        self._minibatch_size: float | None = None
        self._stop_known = self._stop_put_off = False
        self.went_back = False

    @property
    @override
    def iteration(self) -> int:
        return self.controls.iteration

    @property
    def sampling_in_force(self) -> SamplingConfig:
        """How the next rollout is sampled: the config, at the temperature of the dial.

        What is sampled by it carries that temperature, and is scored and trained on with it. Held-
        out prompts are answered by the config itself, so that their numbers stay comparable.
        """
        return replace(self.sampling, temperature=self.controls["temperature"])

    def begin_iteration(self, iteration: int) -> None:
        """Forget the iteration before; the buffer's maker calls it."""
        self.controls.iteration = iteration
        self.checkpoint_complete = False
        self.stop_requested = self.went_back = False
        self.updater.begin()
        self.verdicts.clear()
        self.clock.reset()
        self.ledger.reset(self.device)

    @property
    def updater(self) -> Updater:
        """Takes the optimiser steps; there is one once ``fit`` has started."""
        assert self._updater is not None
        return self._updater

    @property
    def lr_scale(self) -> float:
        """Factor on both learning rates that the size of the current minibatches asks for."""
        size = self._minibatch_size
        return 1.0 if size is None else self.optimizer_config.lr_scale(size)

    @override
    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        scheduler: Any = self.lr_schedulers()
        if batch.is_first:
            # Callbacks may have asked for another rate, or another size of the buffer.
            per_pass = batch.num_steps / batch.num_epochs
            self._minibatch_size = batch.experience.num_responses / per_pass
            refresh(scheduler)
        part = None if self.stop_requested else self.updater.part(batch)
        if part is not None:
            with self.clock.stage(self, "update"):
                self._update(batch, part)
        self._count_rest(self.updater.planned(batch))
        advance(scheduler)
        if batch.is_last:
            self._end_iteration(batch)

    def agree_on_stop(self) -> None:
        """Make any rank's request to stop all ranks', where the Trainer is about to look at it.

        A rank that went on alone would wait for the others forever.
        """
        self.trainer.should_stop = any_rank(self.trainer.should_stop, self.device)

    @override
    def on_train_epoch_start(self) -> None:
        """Put a request to stop off to the first step: at once, it leaves the iteration out."""
        # Lightning leaves an older one set where `min_epochs` lets a run go on.
        self._stop_put_off = self.trainer.should_stop and self.trainer.fit_loop._can_stop_early
        if self._stop_put_off:
            self.trainer.should_stop = False
        self._stop_known = self.trainer.should_stop

    @override
    def on_train_batch_end(self, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        """Carry a request to stop to the end of the iteration; what is left of it is skipped.

        Any rank's request is all ranks', as in ``agree_on_stop``.
        """
        before = self._stop_known
        own = self._stop_put_off or (self.trainer.should_stop and not before)
        self._stop_put_off = False
        asked = any_rank(own, self.device)
        if batch.is_last:
            self.trainer.should_stop = asked or before or self.stop_requested
        elif asked:
            self.stop_requested, self.trainer.should_stop = True, False

    def _update(self, batch: MiniBatch, part: Part) -> None:
        """Take one optimiser step, or note why not."""
        optimizer: Any = self.optimizers()
        terms, report = self.updater.step(
            batch,
            part,
            optimizer=optimizer,
            backward=self.manual_backward,
            unsynced=getattr(self.trainer.model, "no_sync", nullcontext),  # DDP's
            dtype=self._compute_dtype(),
        )
        self.ledger.add_step(part, terms, report, optimizer.param_groups)
        if self.skips.count(report.decision == "nonfinite"):
            self._give_up(batch)

    @override
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with profiled(self, "update.backward"):
            super().manual_backward(loss, *args, **kwargs)

    def _count_rest(self, planned: Part | None) -> None:
        """Count a planned step for the group that it leaves alone."""
        if planned is not None and (idle := IDLE[planned]) is not None:
            self.rested[idle] += 1

    def _give_up(self, batch: MiniBatch) -> None:
        """End an update whose numbers stay not finite; the run goes on only if it is treated."""
        if not is_treated(self.trainer, _NONFINITE):
            raise self.skips.error()
        verdict = Verdict(
            illness=_NONFINITE,
            evidence=self.skips.evidence,
            iteration=batch.experience.iteration,
            source="PPOModule",
        )
        self.report(verdict)
        self.skips.in_a_row, self.updater.stop = 0, "given up"

    def _compute_dtype(self) -> torch.dtype:
        """Coarsest dtype that the forward pass computes in."""
        assert self.networks is not None
        precision = str(self.trainer.precision)
        if "bf16" in precision or "16" in precision.split("-")[0]:
            return torch.bfloat16
        return next(self.networks.parameters()).dtype

    def _end_iteration(self, batch: MiniBatch) -> None:
        """Reduce what was measured; validation joins it, callbacks act on it."""
        stats = self.ledger.stats(batch, num_skipped=self.updater.num_skipped)
        critic = self.ppo.advantage == "gae"
        self.iteration_stats = replace(
            stats,
            **self._times(),
            **self._since_start(stats),
            lag_allowed=allowed_lag(self.engine, self.staleness),
            kl_coef=self.controls["kl_coef"],
            clip_range=self.controls["clip_range"],
            ent_coef=self.controls["ent_coef"],
            kl_returning=float(self.updater.returning),
            optimizer_steps=float(self.global_step),
            penalty_coef=self._only(self.ppo.objective == "penalty", self.controls["penalty_coef"]),
            dual_clip_fraction=self._only(self.ppo.dual_clip is not None, stats.dual_clip_fraction),
            kl_loss=self._only(self.kl.placement == "loss", stats.kl_loss),
            explained_variance=self._only(critic, stats.explained_variance),
            value_mean=self._only(critic, stats.value_mean),
            return_mean=self._only(critic, stats.return_mean),
        )
        if self.ppo.objective == "penalty" and stats.policy_loss is not None and stats.steps_taken:
            self._adapt_penalty(batch)
        if compares_sampler(stats):
            self.sampler_check(stats.sampler_mismatch, self._compute_dtype(), self.engine.dtype)
        if not (stats.steps_taken or self.stop_requested or self._is_treated(stats)):
            warn_of_idle_update(stats)
        call_listeners(self, "on_update_end", self.iteration_stats)

    def _since_start(self, stats: IterationStats) -> dict[str, Any]:
        """Compare the entropy with that of the first buffer, before any step was taken."""
        if self.entropy_start is None and stats.policy_version == 0:
            self.entropy_start = stats.entropy
        if not self.entropy_start or stats.entropy is None:
            return {"entropy_start": self.entropy_start}
        relative = stats.entropy / self.entropy_start
        return {"entropy_start": self.entropy_start, "entropy_relative": relative}

    def _is_treated(self, stats: IterationStats) -> bool:
        """Whether steps that were not finite are a callback's business."""
        return bool(stats.steps_skipped_nonfinite) and is_treated(self.trainer, _NONFINITE)

    def _times(self) -> dict[str, Any]:
        return self.ledger.time_stats(self.clock, device=self.device)

    @staticmethod
    def _only(measured: bool, value: float | None) -> float | None:
        return value if measured else None

    def _adapt_penalty(self, batch: MiniBatch) -> None:
        """PPO-Penalty's own law: its coefficient follows KL(old‖new) *after* the update.

        Measured on the last minibatch, a chance sample of the buffer.
        """
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            kl = self.updater.kl_old_after(batch)
        before = self.controls.wanted(PENALTY, "penalty_coef")
        adapted = adapted_penalty_coef(before, kl, target=self.ppo.penalty_target)
        request = Request(source=PENALTY, dial="penalty_coef", value=float(adapted))
        self.controls.request(request)

    @override
    def on_train_epoch_end(self) -> None:
        assert self.iteration_stats is not None
        self._diagnose()
        self.iteration_stats = replace(self.iteration_stats, **self._times())
        values = {k: v for k, v in self.iteration_stats.to_log().items() if k[:4] != "val/"}
        log_iteration(self.trainer, values, iteration=self.iteration_stats.iteration)
        self.checkpoint_complete = True
        call_listeners(self, "on_iteration_end", self.iteration_stats)
        self.agree_on_stop()

    def _diagnose(self) -> None:
        """Have callbacks act on what any rank has reported."""
        found = gather_from_ranks(self.verdicts)
        verdicts = tuple(dict.fromkeys(found))
        if verdicts:
            call_listeners(self, "on_diagnosis", verdicts)
        if self.went_back:  # what was validated is undone: nothing may be selected by it
            self.ahead.discard()  # and what is being sampled is of weights that were given up
            measured: dict[str, Any] = self.trainer.callback_metrics
            undone = [name for name in measured if name.startswith("val/")]
            measured.update({name: torch.tensor(torch.nan) for name in undone})

    def report(self, verdict: Verdict) -> None:
        """Say that the run is ill; callbacks that treat it are asked when the iteration ends.

        On any rank, from a callback's ``on_train_epoch_end`` at the latest.
        """
        self.verdicts.append(verdict)
