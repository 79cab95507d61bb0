"""PPOModule: the actor-critic PPO step under manual optimisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
import torch
from typing_extensions import override

from ppo_lightning.checkpointing.entry import check_beside, pack_checkpoint, unpack_checkpoint
from ppo_lightning.configs import (
    CriticConfig,
    GroupConfig,
    GuardConfig,
    KLConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    ReferenceConfig,
    RewardProcessing,
    SamplingConfig,
    ValidationConfig,
)
from ppo_lightning.diagnostics import review_scores
from ppo_lightning.distributed import all_reduce_max, all_reduce_sum, any_rank
from ppo_lightning.functional import adapted_penalty_coef, moments
from ppo_lightning.models import (
    ActorCritic,
    ReferencePolicy,
    build_actor_critic,
    check_tokenizers,
    check_vocabulary,
    load_tokenizer,
    position_limits,
)
from ppo_lightning.modules.collection import Collection
from ppo_lightning.modules.controls import Controls, Request, ppo_dials
from ppo_lightning.modules.guards import SelfCheck, SkipCounter
from ppo_lightning.modules.held_out import HeldOut
from ppo_lightning.modules.held_out_steps import HeldOutSteps
from ppo_lightning.modules.metrics_file import MetricsFile
from ppo_lightning.modules.objective import Coefficients
from ppo_lightning.modules.optim import (
    advance,
    build_optimizer,
    build_scheduler,
    clip_gradients,
    gradient_norm,
    refresh,
)
from ppo_lightning.modules.reporting import IterationLedger, log_iteration
from ppo_lightning.modules.review import review_run, say
from ppo_lightning.modules.stages import call_listeners
from ppo_lightning.modules.trainer_checks import check_trainer, default_checkpointing
from ppo_lightning.modules.update import Objective, accumulate_gradients, kl_old_of, report_of
from ppo_lightning.rewards import Reward, RewardPipeline, RewardResult, RewardTerm
from ppo_lightning.rollout import NativeEngine, RolloutEngine, StopRules
from ppo_lightning.types import Experience, MiniBatch, PromptBatch


class PPOModule(HeldOutSteps):
    """Train a causal language model with PPO against a reward.

    One Lightning epoch is one iteration (rollout and update), one ``training_step`` one optimiser
    step. Weights are loaded in ``configure_model``.

    Args:
        policy: The actor.
        rewards: Weighted reward components; their weighted sum is the score.
        critic_model: The value network.
        reference: The frozen model that the KL is measured against.
        sampling: How responses are sampled.
        ppo: Objective, advantages, update epochs.
        kl: Penalty towards the reference.
        actor: Learning rate of the actor.
        critic: Learning rate of the critic.
        optimizer: The optimiser of both.
        reward_processing: Penalties, normalisation and clipping of scores.
        gold: Independent judge of held-out answers; the actor never sees it.
        validation: How held-out prompts are answered.
        guards: What happens when numbers go wrong.
        engine: Samples the responses; None takes the native decode loop.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: list[RewardTerm],
        *,
        critic_model: CriticConfig = CriticConfig(),  # noqa: B008 - frozen, as are those below
        reference: ReferenceConfig = ReferenceConfig(),  # noqa: B008
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        ppo: PPOConfig = PPOConfig(),  # noqa: B008
        kl: KLConfig = KLConfig(),  # noqa: B008
        actor: GroupConfig = GroupConfig(),  # noqa: B008
        critic: GroupConfig = GroupConfig(lr=5e-6),  # noqa: B008
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        reward_processing: RewardProcessing = RewardProcessing(),  # noqa: B008
        gold: Reward | None = None,
        validation: ValidationConfig = ValidationConfig(),  # noqa: B008
        guards: GuardConfig = GuardConfig(),  # noqa: B008
        engine: RolloutEngine | None = None,
    ) -> None:
        super().__init__(validation)
        self.automatic_optimization = False
        self.policy = policy
        self.critic_model = critic_model
        self.reference_config = reference
        self.sampling = sampling
        self.ppo = ppo
        self.kl = kl
        self.actor = actor
        self.critic = critic
        self.optimizer_config = optimizer
        self.guards = guards
        self.engine = engine or NativeEngine()
        self.reward_pipeline = RewardPipeline(rewards, reward_processing)
        self.gold = gold
        self._build_state(tuple(term.name for term in rewards))

    def _build_state(self, components: tuple[str, ...]) -> None:
        """What changes while the run goes on."""
        ppo, kl, guards = self.ppo, self.kl, self.guards
        self.controls = Controls(ppo_dials(ppo, kl))
        self.ledger = IterationLedger(components)
        self.self_check = SelfCheck(guards.self_check)
        self.skips = SkipCounter(guards.max_skipped_steps)
        self.networks: ActorCritic | None = None
        self.update_stopped = False
        self.stop_requested = False
        self.checkpoint_complete = True
        self._reference: ReferencePolicy | None = None
        self._resumed: Mapping[str, Any] = {}

    # ------------------------------------------------------------------ what the data module asks

    @cached_property
    def tokenizer(self) -> Any:
        """The actor's tokenizer."""
        return load_tokenizer(self.policy.path, trust_remote_code=self.policy.trust_remote_code)

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that leaves room for a whole response; None is unlimited."""
        positions = min(self._position_limits.values(), default=None)
        return None if positions is None else positions - self.sampling.max_new_tokens

    @property
    def shortest_model(self) -> str:
        """Setting that names the model with the fewest positions."""
        limits = self._position_limits
        return f"model.init_args.{min(limits, key=lambda name: limits[name])}"

    @cached_property
    def _position_limits(self) -> dict[str, int]:
        return position_limits(self.policy, self.critic_model, self.reference_config)

    @property
    @override
    def iteration(self) -> int:
        return self.controls.iteration

    @property
    def num_update_epochs(self) -> int:
        """Most passes over a buffer."""
        return self.ppo.num_update_epochs

    def collect(self, prompts: PromptBatch, *, iteration: int, num_responses: int) -> Experience:
        """Sample, score and shape the buffer of one iteration.

        Args:
            prompts: This rank's prompts, a row for each response.
            iteration: Number of the iteration.
            num_responses: Responses over all ranks.
        """
        self.begin_iteration(iteration)
        collected = self._collection().run(
            prompts.to(self.device),
            iteration=iteration,
            num_responses=num_responses,
            kl_coef=self.controls["kl_coef"],
            policy_version=self.global_step,
        )
        if iteration == 0 and self.guards.advice != "off":
            self._review_scores(collected.result)
        self.ledger.add_rollout(collected, self.controls["kl_coef"], self.reward_pipeline.weights)
        call_listeners(self, "on_rollout_end", collected)
        return collected.experience

    def _review_scores(self, result: RewardResult) -> None:
        """Compare the spread of the first scores with β."""
        usable = ~result.dropped
        scores = moments(result.raw, usable, reduce=all_reduce_sum)
        if scores.count == 0:
            return
        spread = math.sqrt(scores.var)
        coefficient = self.controls["kl_coef"]
        how = self.reward_pipeline.processing
        say(review_scores(spread, kl_coef=coefficient, normalize=how), self.guards.advice)

    def begin_iteration(self, iteration: int) -> None:
        """Forget the iteration before; the buffer's maker calls it."""
        self.controls.iteration = iteration
        self.checkpoint_complete = False
        self.update_stopped = self.stop_requested = False
        self.clock.reset()
        self.ledger.reset(self.device)

    def _collection(self) -> Collection:
        assert self.networks is not None
        return Collection(
            networks=self.networks,
            reference=self.reference,
            engine=self.engine,
            rewards=self.reward_pipeline,
            tokenizer=self.tokenizer,
            stops=self._stops(),
            sampling=self.sampling,
            ppo=self.ppo,
            kl=self.kl,
            stage=partial(self.clock.stage, self),
            precision=self.trainer.precision_plugin.forward_context,
        )

    @override
    def held_out(self) -> HeldOut:
        assert self.networks is not None
        return HeldOut(
            networks=self.networks,
            reference=self.reference,
            engine=self.engine,
            rewards=self.reward_pipeline,
            gold=self.gold,
            tokenizer=self.tokenizer,
            stops=self._stops(),
            sampling=self.sampling,
            max_tokens=self.ppo.microbatch_tokens,
            precision=self.trainer.precision_plugin.forward_context,
        )

    def _stops(self) -> StopRules:
        assert self.networks is not None
        return StopRules.build(self.tokenizer, self.networks.actor, self.sampling)

    # ------------------------------------------------------------------ building

    @property
    def reference(self) -> ReferencePolicy:
        """The frozen reference; not a submodule, so it is in no checkpoint."""
        assert self._reference is not None, "the reference exists once `configure_model` has run"
        return self._reference

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        own: list[pl.Callback] = default_checkpointing(self.trainer)
        check_trainer(self.trainer)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, MetricsFile) for callback in callbacks):
            own.append(MetricsFile())
        return own

    @override
    def configure_model(self) -> None:
        if self.networks is not None:
            return
        check_tokenizers(self.tokenizer, self.policy, self.critic_model, self.reference_config)
        networks = build_actor_critic(self.policy, self.critic_model)
        reference = ReferencePolicy.build(self.reference_config, self.policy, networks.actor)
        named = {"actor": networks.actor, "critic": networks.critic}
        with reference.causal_lm() as model:
            check_vocabulary(
                self.tokenizer,
                {name: m for name, m in named.items() if m is not None} | {"reference": model},
            )
        # Train mode is for activation checkpointing alone: no dropout is left to be switched on.
        self.networks, self._reference = networks.train(), reference

    @override
    def configure_optimizers(self) -> Any:
        assert self.networks is not None
        optimizer = build_optimizer(
            list(self.networks.actor_parameters()),
            list(self.networks.critic_parameters()),
            config=self.optimizer_config,
            actor_lr=self.actor.lr,
            critic_lr=self.critic.lr,
        )
        scheduler = build_scheduler(
            optimizer,
            actor=self.actor,
            critic=self.critic,
            total_steps=self._end_of_schedules(),
            factors=lambda name: self.controls[f"{name}_lr_factor"],
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def _end_of_schedules(self) -> int | None:
        if self.actor.schedule == self.critic.schedule == "constant":
            return None  # asking for the number makes Lightning build the loader early
        return self.planned_steps()

    def planned_steps(self) -> int | None:
        """Optimiser steps of the whole run if no update stops early; None for an endless run."""
        steps = self.trainer.estimated_stepping_batches
        return None if steps == float("inf") else int(steps)

    @override
    def frozen_to_device(self) -> None:
        """Bring what is no submodule to the module's device."""
        self.reference.to(self.device)
        self.reward_pipeline.setup(self.device)
        if self.gold is not None:
            self.gold.setup(self.device)

    @override
    def on_fit_start(self) -> None:
        self.frozen_to_device()
        check_beside(self._resumed, self._beside())
        if self.trainer.current_epoch == 0:
            review_run(self, self.guards.advice)

    @override
    def teardown(self, stage: str) -> None:
        """Let the rewards go of what they loaded; the next run sets them up again."""
        self.reward_pipeline.close()
        if self.gold is not None:
            self.gold.close()

    # ------------------------------------------------------------------ the update

    @override
    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        scheduler: Any = self.lr_schedulers()
        if batch.is_first:
            refresh(scheduler)  # a callback may have asked for another rate between iterations
        working = not (self.update_stopped or self.stop_requested)
        if working and batch.epoch < int(self.controls["num_update_epochs"]):
            with self.clock.stage(self, "update"):
                self._update(batch)
        advance(scheduler)
        if batch.is_last:
            self._end_iteration(batch)

    @override
    def on_train_batch_end(self, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        """Carry a request to stop to the end of the iteration; what is left of it is skipped.

        Any rank's request is all ranks': one that went on alone would wait for the others forever.
        """
        asked = any_rank(self.trainer.should_stop, self.device)
        if batch.is_last:
            self.trainer.should_stop = asked or self.stop_requested
        elif asked:
            self.stop_requested, self.trainer.should_stop = True, False

    def _update(self, batch: MiniBatch) -> None:
        """One forward and backward over the minibatch, then the step, or the reason for none."""
        optimizer: Any = self.optimizers()
        terms = accumulate_gradients(
            batch.experience, self._objective(), self._coefficients(), backward=self.manual_backward
        )
        groups = {g["name"]: g["params"] for g in optimizer.param_groups}
        norms = {name: gradient_norm(parameters) for name, parameters in groups.items()}
        report = report_of(terms, norms["actor"], norms["critic"], kl_limit=self.ppo.kl_limit)
        if batch.is_first:
            self.self_check(all_reduce_max(terms.first_error), self._compute_dtype())
        if report.decision == "step":
            for name, config in (("actor", self.actor), ("critic", self.critic)):
                clip_gradients(groups[name], max_norm=config.max_grad_norm, norm=norms[name])
            optimizer.step()
        optimizer.zero_grad()
        self.update_stopped = report.decision == "kl_stop"
        self.ledger.add_step(batch, terms, report, optimizer.param_groups)
        self.skips.count(report.decision == "nonfinite")

    def _objective(self) -> Objective:
        assert self.networks is not None
        return Objective(
            networks=self.networks,
            reference=self.reference,
            ppo=self.ppo,
            kl=self.kl,
            temperature=self.sampling.temperature,
        )

    def _coefficients(self) -> Coefficients:
        low = self.controls["clip_range"]
        widened = self.ppo.clip_range_high or self.ppo.clip_range
        return Coefficients(
            clip_low=low,
            clip_high=low * widened / self.ppo.clip_range,
            ent_coef=self.controls["ent_coef"],
            kl_coef=self.controls["kl_coef"],
            penalty_coef=self.controls["penalty_coef"],
        )

    def _compute_dtype(self) -> torch.dtype:
        """Coarsest dtype that the forward pass computes in."""
        assert self.networks is not None
        precision = str(self.trainer.precision)
        if "bf16" in precision or "16" in precision.split("-")[0]:
            return torch.bfloat16
        return next(self.networks.parameters()).dtype

    def _end_iteration(self, batch: MiniBatch) -> None:
        """Reduce what was measured; validation joins it, callbacks act on it."""
        stats = self.ledger.stats(batch)
        self.iteration_stats = replace(
            stats,
            **self._times(),
            kl_coef=self.controls["kl_coef"],
            clip_range=self.controls["clip_range"],
            optimizer_steps=float(self.global_step),
            penalty_coef=self._only(self.ppo.objective == "penalty", self.controls["penalty_coef"]),
            dual_clip_fraction=self._only(self.ppo.dual_clip is not None, stats.dual_clip_fraction),
            kl_loss=self._only(self.kl.placement == "loss", stats.kl_loss),
        )
        if self.ppo.objective == "penalty":
            self._adapt_penalty(batch)
        call_listeners(self, "on_update_end", self.iteration_stats)

    def _times(self) -> dict[str, Any]:
        return self.ledger.time_stats(
            self.clock.seconds, total=self.clock.elapsed, device=self.device
        )

    @staticmethod
    def _only(measured: bool, value: float | None) -> float | None:
        return value if measured else None

    def _adapt_penalty(self, batch: MiniBatch) -> None:
        """PPO-Penalty's own law: its coefficient follows KL(old‖new) *after* the update.

        Measured on the last minibatch, a chance sample of the buffer.
        """
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            kl = kl_old_of(batch.experience, self._objective(), self._coefficients())
        adapted = adapted_penalty_coef(
            self.controls["penalty_coef"], kl, target=self.ppo.penalty_target
        )
        request = Request(source="PPO-Penalty", dial="penalty_coef", value=float(adapted))
        self.controls.request(request)

    @override
    def on_train_epoch_end(self) -> None:
        assert self.iteration_stats is not None
        self.iteration_stats = replace(self.iteration_stats, **self._times())
        values = {k: v for k, v in self.iteration_stats.to_log().items() if k[:4] != "val/"}
        log_iteration(self.trainer, values, iteration=self.iteration_stats.iteration)
        self.checkpoint_complete = True
        call_listeners(self, "on_iteration_end", self.iteration_stats)

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        extra = {
            "controls": self.controls.state_dict(),
            "skipped_in_a_row": self.skips.in_a_row,
            "models": {
                "policy": asdict(self.policy),
                "critic_model": asdict(self.critic_model),
                "reference": asdict(self.reference_config),
                "sampling": asdict(self.sampling),
            },
        }
        pack_checkpoint(
            checkpoint,
            self,
            complete=self.checkpoint_complete,
            extra=extra,
            beside=self._beside(),
        )

    def _beside(self) -> dict[str, str]:
        """Fingerprints of the frozen models that are no part of the module."""
        return {"`reference.path`": self.reference.fingerprint()} | {
            f"`path` of the reward `{name}`": found
            for name, found in self.reward_pipeline.fingerprints().items()
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        entry = unpack_checkpoint(checkpoint, self)
        self._resumed = entry  # the rest is checked once the rewards are loaded
        self.controls.load_state_dict(entry["controls"])
        self.skips.in_a_row = int(entry["skipped_in_a_row"])
