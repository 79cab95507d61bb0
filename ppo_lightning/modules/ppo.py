"""PPOModule: the actor-critic PPO step under manual optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.checkpointing.entry import (
    REFERENCE,
    check_beside,
    pack_checkpoint,
    unpack_checkpoint,
)
from ppo_lightning.configs import (
    CriticConfig,
    GroupConfig,
    GuardConfig,
    KLConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    PTXConfig,
    ReferenceConfig,
    RewardProcessing,
    SamplingConfig,
    StalenessConfig,
    ValidationConfig,
)
from ppo_lightning.data import Learner
from ppo_lightning.distributed import forget_passes, gathered
from ppo_lightning.io import StrPath
from ppo_lightning.models import (
    ActorCritic,
    ReferencePolicy,
    build_actor_critic,
    check_tokenizers,
    check_vocabulary,
    load_tokenizer,
    position_limits,
    shard_networks,
)
from ppo_lightning.modules.actor_folder import write_actor
from ppo_lightning.modules.collection import Collection
from ppo_lightning.modules.guards import SelfCheck
from ppo_lightning.modules.held_out import HeldOut
from ppo_lightning.modules.histogram_file import HistogramFile
from ppo_lightning.modules.host_memory import keep_freed_memory
from ppo_lightning.modules.metrics_file import MetricsFile
from ppo_lightning.modules.monitors import check_monitors
from ppo_lightning.modules.optim import (
    build_optimizer,
    build_scheduler,
)
from ppo_lightning.modules.passes import num_passes
from ppo_lightning.modules.review import check_together, review_run
from ppo_lightning.modules.run_safety import run_callbacks
from ppo_lightning.modules.score_report import ScoreReport
from ppo_lightning.modules.sharded_strategy import check_shardable, mesh_of
from ppo_lightning.modules.shared_gradients import SharedGradients
from ppo_lightning.modules.stages import call_listeners
from ppo_lightning.modules.staleness import EndEngine, check_staleness
from ppo_lightning.modules.start import review_first_buffer
from ppo_lightning.modules.text_mix import TextMix
from ppo_lightning.modules.trainer_checks import check_trainer, spare_copies
from ppo_lightning.modules.update import Objective
from ppo_lightning.modules.update_steps import PENALTY, UpdateSteps
from ppo_lightning.modules.updater import Updater
from ppo_lightning.rewards import Reward, RewardPipeline, RewardTerm
from ppo_lightning.rollout import BackgroundEngine, NativeEngine, RolloutEngine, StopRules
from ppo_lightning.types import Experience, PromptBatch, Sequences


class PPOModule(UpdateSteps):
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
        ptx: Language modelling on texts beside PPO; None is PPO alone.
        engine: Samples the responses; None takes the native decode loop.
        staleness: What becomes of responses of older weights, from engines that sample ahead.
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
        ptx: PTXConfig | None = None,
        engine: RolloutEngine | None = None,
        staleness: StalenessConfig = StalenessConfig(),  # noqa: B008
    ) -> None:
        pipeline = RewardPipeline(rewards, reward_processing)  # first: it checks the names
        components = tuple(term.name for term in rewards)
        super().__init__(validation, ppo=ppo, kl=kl, guards=guards, components=components)
        self.policy = policy
        self.critic_model = critic_model
        self.reference_config = reference
        self.sampling = sampling
        self.actor = actor
        self.critic = critic
        self.optimizer_config = optimizer
        self.ptx = ptx
        self.engine = engine or NativeEngine()
        self.staleness = staleness
        self.reward_pipeline = pipeline
        self.gold = gold
        self.networks: ActorCritic | None = None
        self._reference: ReferencePolicy | None = None
        self._resumed: Mapping[str, Any] = {}
        self.start_anew()

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
    def shortest_model(self) -> str | None:
        """Setting that names the model with the fewest positions; None where nothing limits."""
        limits = self._position_limits
        name = min(limits, key=lambda name: limits[name], default=None)
        return None if name is None else f"model.init_args.{name}"

    @cached_property
    def _position_limits(self) -> dict[str, int]:
        return position_limits(self.policy, self.critic_model, self.reference_config)

    @property
    def num_passes(self) -> int:
        """Most passes over a buffer."""
        return num_passes(self.ppo)

    @property
    def num_prompts_factor(self) -> float:
        """Factor on the prompts of the next buffer."""
        return self.controls["num_prompts_factor"]

    @property
    def looks_ahead(self) -> bool:
        """Whether the engine samples the next buffer while this one is trained on."""
        return isinstance(self.engine, BackgroundEngine) and self.engine.ahead > 0

    def prefetch(self, prompts: PromptBatch, *, iteration: int) -> None:
        """Take the prompts of the next iteration, which are answered ahead."""
        self.ahead.prefetch(prompts.to(self.device), iteration=iteration)

    def collect(self, prompts: PromptBatch, *, iteration: int, num_responses: int) -> Experience:
        """Sample, score and shape the buffer of one iteration.

        Args:
            prompts: This rank's prompts, a row for each response.
            iteration: Number of the iteration.
            num_responses: Responses over all ranks.
        """
        collected = self._collection().run(
            prompts.to(self.device),
            iteration=iteration,
            num_responses=num_responses,
            kl_coef=self.controls["kl_coef"],
            policy_version=self.global_step,
            limits=self.updater.limits(),
        )
        self.updater.returning = collected.returning
        if iteration == 0 and self.guards.advice != "off":
            review_first_buffer(self, collected)
        in_reward = self.kl.placement != "loss"
        kl_coef = self.controls["kl_coef"] if in_reward else 0.0
        self.ledger.add_rollout(collected, kl_coef)
        call_listeners(self, "on_rollout_end", collected)
        assert self.networks is not None
        forget_passes(self.networks, self.reference.network)
        return collected.experience

    def with_frozen_states(self, sequences: Sequences) -> Sequences:
        """Add what the actor's frozen blocks make of a buffer, as ``collect`` does."""
        return self._collection().with_frozen_states(sequences)

    def _collection(self) -> Collection:
        assert self.networks is not None
        return Collection(
            networks=self.networks,
            reference=self.reference,
            engine=self.engine,
            rewards=self.reward_pipeline,
            tokenizer=self.tokenizer,
            stops=self._stops(),
            sampling=self.sampling_in_force,
            ppo=self.ppo,
            kl=self.kl,
            stage=partial(self.clock.stage, self),
            precision=self.trainer.precision_plugin.forward_context,
            staleness=self.staleness,
            versions=self.versions,
            ahead=self.ahead,
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

    @override
    def gathered(self) -> AbstractContextManager[None]:
        assert self.networks is not None
        judges = () if self.gold is None else self.gold.sharded_networks()
        rewards = self.reward_pipeline.sharded_networks()
        return gathered(self.networks.actor, self.reference.network, *rewards, *judges)

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
        own: list[pl.Callback] = run_callbacks(self.trainer)
        check_trainer(self.trainer)
        if self.trainer.state.fn == "fit":
            check_monitors(self)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        given = {type(callback) for callback in callbacks}
        added = (MetricsFile, HistogramFile, ScoreReport, EndEngine, SharedGradients)
        return own + [c() for c in added if not any(issubclass(kind, c) for kind in given)]

    @override
    def configure_model(self) -> None:
        if self.networks is not None:
            return
        mesh = mesh_of(self._trainer)
        if mesh is not None:
            peers = mesh["tensor_parallel"].size()
            check_shardable(self.policy, self.optimizer_config, self.engine, peers=peers)
        check_tokenizers(self.tokenizer, self.policy, self.critic_model, self.reference_config)
        networks = build_actor_critic(self.policy, self.critic_model)
        reference = ReferencePolicy.build(self.reference_config, self.policy, networks.actor)
        named = {"actor": networks.actor, "critic": networks.critic}
        with reference.causal_lm() as model:
            check_vocabulary(
                self.tokenizer,
                {name: m for name, m in named.items() if m is not None} | {"reference": model},
            )
        self.engine.check(networks.actor)
        self.engine.prepare(self.policy)
        if mesh is not None:
            shard_networks(networks, mesh)
            reference.shard(mesh)
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
            factors=lambda name: self.controls[f"{name}_lr_factor"] * self.lr_scale,
            rested=lambda name: self.rested[name],
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

    def _build_updater(self) -> Updater:
        assert self.networks is not None
        datamodule = getattr(self.trainer, "datamodule", None)
        mix = None
        if self.ptx is not None:
            seed = getattr(datamodule, "seed", 0)
            positions = self._position_limits.get("policy.path")
            learner = Learner(
                self.tokenizer,
                end_ids=self._stops().end_ids,
                chat=getattr(datamodule, "chat", "auto"),
                system_prompt=getattr(datamodule, "system_prompt", None),
            )
            mix = TextMix.build(
                self.ptx, self.tokenizer, learner=learner, seed=seed, max_positions=positions
            )
        objective = Objective(
            networks=self.networks,
            reference=self.reference,
            ppo=self.ppo,
            kl=self.kl,
        )
        return Updater(
            objective=objective,
            controls=self.controls,
            groups={"actor": self.actor, "critic": self.critic},
            self_check=SelfCheck(self.guards.self_check),
            text_mix=mix,
        )

    @override
    def on_fit_start(self) -> None:
        self.frozen_to_device()
        check_beside(self._resumed, self._beside())
        if self.trainer.current_epoch == 0:
            review_run(self, self.guards.advice)
        check_together(self)
        check_staleness(self.engine, self.staleness)
        self._updater = self._build_updater()

    @override
    def setup(self, stage: str) -> None:
        """Begin a fit as a new run; a checkpoint that is resumed is loaded later."""
        if stage == "fit":
            keep_freed_memory()
            spare_copies(self.trainer)
            self.start_anew()
            self.reward_pipeline.load_state_dict({})
            if self.ppo.objective == "penalty":
                self.controls.claim("penalty_coef", PENALTY)

    @override
    def on_train_start(self) -> None:
        """Let go of what laws of the resumed run asked for that this run does not have.

        What a doctor or a guard asked for stays, so it is said.
        """
        self.controls.drop_unclaimed()
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        present = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
        for line in self.controls.left_over(present):
            rank_zero_warn(line)
        self.agree_on_stop()

    @override
    def teardown(self, stage: str) -> None:
        """Let engine and rewards go of what they started; the next run sets them up again."""
        self.engine.close()
        self.reward_pipeline.close()
        if self.gold is not None:
            self.gold.close()

    # ------------------------------------------------------------------ the model it leaves behind

    kind = "ppo"

    @property
    def export_source(self) -> str:
        """Path of the model that the actor began as."""
        return self.policy.path

    @property
    def export_network(self) -> nn.Module:
        """What ``export`` writes."""
        assert self.networks is not None
        return self.networks.actor

    def export(self, folder: StrPath, *, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the actor as a Hugging Face folder with its tokenizer and chat template.

        Adapters are merged, in a copy. Where ``ActorEMA`` answers the held-out prompts, it is
        the average that is written. To be called on one rank; where weights lie in shards on all of
        them, of which the first writes.

        Args:
            folder: New or empty; it appears only when complete.
            weights: Trained ones to write instead of the actor's own, all of them, by their names
                in the actor; then to be called on one rank.
        """
        write_actor(self, folder, weights)

    # ------------------------------------------------------------------ checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        extra = {
            "controls": self.controls.state_dict(),
            "skipped_in_a_row": self.skips.in_a_row,
            "rested": dict(self.rested),
            "entropy_start": self.entropy_start,
            "rewards": self.reward_pipeline.state_dict(),
            "versions": self.versions.state_dict(),
            "ahead": self._state_ahead(),
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

    def _state_ahead(self) -> dict[str, Any]:
        """The buffer that is being sampled, where the run can go on from here at all."""
        resumable = self.checkpoint_complete and isinstance(self.engine, BackgroundEngine)
        return self.ahead.state_dict(self.engine, self.device) if resumable else {}

    def _beside(self) -> dict[str, str]:
        """Fingerprints of the frozen models that are no part of the module."""
        return {REFERENCE: self.reference.fingerprint()} | {
            f"`path` of the reward `{name}`": found
            for name, found in self.reward_pipeline.fingerprints().items()
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        entry = unpack_checkpoint(checkpoint, self)
        self._resumed = entry  # the rest is checked once the rewards are loaded
        self.controls.load_state_dict(entry["controls"])
        self.skips.in_a_row = int(entry["skipped_in_a_row"])
        self.rested = dict(entry["rested"])
        self.entropy_start = entry.get("entropy_start")
        self.reward_pipeline.load_state_dict(entry["rewards"])
        self.versions.load_state_dict(entry.get("versions", {}))
        self.ahead.load_state_dict(entry.get("ahead", {}))
