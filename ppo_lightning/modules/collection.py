"""The first half of an iteration: sample, score, shape."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import KLConfig, PPOConfig, SamplingConfig, StalenessConfig
from ppo_lightning.distributed import (
    all_reduce_max,
    all_reduce_sum,
    any_rank,
    gathered,
    require_alike_among_peers,
)
from ppo_lightning.errors import RolloutError
from ppo_lightning.functional import in_flat_group, spread_over
from ppo_lightning.models import ActorCritic
from ppo_lightning.modules.decision import Limits
from ppo_lightning.rewards import RewardPipeline, RewardResult
from ppo_lightning.rollout import (
    BackgroundEngine,
    Freshness,
    NetworkScores,
    PolicyVersions,
    RolloutEngine,
    RolloutsAhead,
    ShapedRollout,
    StopRules,
    build_experience,
    completions_of,
    finite_scores,
    judged,
    score_with_networks,
    with_frozen_states,
)
from ppo_lightning.rollout.experience import Reference
from ppo_lightning.types import Completions, Experience, PromptBatch, Rollout, Sequences


@dataclass(frozen=True, kw_only=True)
class Collected:
    """A buffer and everything that was measured while it was made; callbacks get it.

    Args:
        rollout: Sampled ids.
        completions: The same as text.
        result: Scores, by component and processed.
        networks: What actor, critic and reference say of the tokens.
        shaped: Token rewards and raw advantages.
        experience: The buffer.
        kept: Responses that are in the buffer: with tokens, a usable score, and finite numbers from
            all networks. ``[B]`` bool.
        returning: Whether the policy is beyond a bound on its KL to the reference, so that the
            buffer is to train the way back.
        nonfinite: Responses of which a network gave a number that is not finite. ``[B]`` bool.
        freshness: How old the responses are, and what was done about it.
    """

    rollout: Rollout
    completions: Completions
    result: RewardResult
    networks: NetworkScores
    shaped: ShapedRollout
    experience: Experience
    kept: Tensor
    nonfinite: Tensor
    returning: bool
    freshness: Freshness


@dataclass(frozen=True, kw_only=True)
class Collection:
    """Runs the stages ``rollout``, ``reward`` and ``scoring``.

    Args:
        networks: Actor and critic.
        reference: Frozen reference.
        engine: Samples responses.
        rewards: Scores them.
        tokenizer: Decodes them.
        stops: When a response ends.
        sampling: How they are sampled, at the temperature in force.
        ppo: Advantages.
        kl: Penalty towards the reference.
        stage: Context of a named stage.
        precision: Context of a forward pass in the run's precision.
        staleness: What becomes of responses of older weights.
        versions: Of the run's weights.
        ahead: Buffers that are sampled ahead, for engines that do so.
    """

    networks: ActorCritic
    reference: Reference
    engine: RolloutEngine
    rewards: RewardPipeline
    tokenizer: Any
    stops: StopRules
    sampling: SamplingConfig
    ppo: PPOConfig
    kl: KLConfig
    stage: Callable[[str], AbstractContextManager[None]]
    precision: Callable[[], AbstractContextManager[None]]
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    versions: PolicyVersions = field(default_factory=PolicyVersions)
    ahead: RolloutsAhead = field(default_factory=RolloutsAhead)

    def run(
        self,
        prompts: PromptBatch,
        *,
        iteration: int,
        num_responses: int,
        kl_coef: float,
        policy_version: int,
        limits: Limits,
    ) -> Collected:
        """Make the buffer of one iteration.

        Args:
            prompts: This rank's, on its device.
            iteration: Number of the iteration.
            num_responses: Responses over all ranks.
            kl_coef: β in force.
            policy_version: Optimiser steps behind the current weights.
            limits: On the KL to the reference.
        """
        with self.stage("rollout"), self.precision():
            rollout, freshness = self._sample(prompts, iteration, policy_version)
        with self.stage("reward"), gathered(*self.rewards.sharded_networks()):
            completions = completions_of(rollout, self.tokenizer)
            result = self.rewards(
                completions, groups=prompts.groups, reduce=all_reduce_sum, iteration=iteration
            )
        with self.stage("scoring"):
            sequences = self.with_frozen_states(rollout.sequences)
            networks, finite = finite_scores(self._network_scores(sequences, rollout.temperature))
            cap = self.staleness.importance_cap
            freshness = freshness.weighed(networks.logprobs, rollout, cap=cap)
            kept = finite & _scored(result, rollout) & ~freshness.dropped
            numbers = {"kl_coef": kl_coef, "num_responses": num_responses, "iteration": iteration}
            experience, shaped = self._build(
                rollout, result, networks, kept, trunk=sequences.trunk, **numbers
            )
            experience = replace(experience, importance_weights=freshness.weights)
        return Collected(
            rollout=rollout,
            completions=completions,
            result=result,
            networks=networks,
            shaped=shaped,
            experience=experience,
            kept=kept,
            nonfinite=~finite,
            freshness=freshness,
            returning=_beyond(limits, networks, rollout.response_mask & kept[:, None]),
        )

    def _build(
        self,
        rollout: Rollout,
        result: RewardResult,
        networks: NetworkScores,
        kept: Tensor,
        **options: Any,
    ) -> tuple[Experience, ShapedRollout]:
        return build_experience(
            rollout,
            result.scores.to(kept.device),
            networks,
            used=self._used(kept, rollout, result),
            token_scores=_token_scores(result, rollout),
            ppo=self.ppo,
            kl=self.kl,
            reduce=all_reduce_sum,
            **options,
        )

    def _used(self, kept: Tensor, rollout: Rollout, result: RewardResult) -> Tensor:
        """Responses that the losses count. ``[B]`` bool."""
        used = kept
        if self.rewards.processing.mask_truncated:
            used = used & ~rollout.truncated
        if self.ppo.drop_flat_prompts:
            scores, groups = result.totals.to(kept.device), rollout.prompts.groups
            used = used & ~in_flat_group(scores, groups, kept, reduce=all_reduce_sum)
        return used

    def _sample(
        self, prompts: PromptBatch, iteration: int, policy_version: int
    ) -> tuple[Rollout, Freshness]:
        """Have the prompts answered, and look at how old the answers are."""
        _require_one_temperature(self.sampling, prompts.prompt_ids.device)
        self.versions.note(policy_version)
        engine, actor = self.engine, self.networks.actor
        settings: dict[str, Any] = {"stops": self.stops, "policy_version": policy_version}

        def sample(asked: PromptBatch, sampling: SamplingConfig) -> Rollout:
            with gathered(actor):  # ranks take different numbers of steps
                return engine.generate(actor, asked, sampling=sampling, **settings)

        if isinstance(engine, BackgroundEngine):
            begin = partial(engine.begin, actor, sampling=self.sampling, **settings)
            rollout = self.ahead.sample(engine, prompts, iteration=iteration, begin=begin)
        else:
            rollout = sample(prompts, self.sampling)
        require_alike_among_peers(rollout.response_ids)
        # What is sampled again joins a buffer, which has one temperature.
        again = replace(self.sampling, temperature=rollout.temperature)
        return judged(
            rollout,
            self.versions,
            self.staleness,
            sample=partial(sample, sampling=again),
            any_rank=partial(any_rank, device=prompts.prompt_ids.device),
        )

    def with_frozen_states(self, sequences: Sequences) -> Sequences:
        """Add what the actor's frozen blocks make of a rollout's tokens, if it has any."""
        with self.precision():
            return with_frozen_states(
                sequences, self.networks, max_tokens=self.ppo.microbatch_tokens
            )

    def _network_scores(self, sequences: Sequences, temperature: float) -> NetworkScores:
        with self.precision():
            return score_with_networks(
                sequences,
                networks=self.networks,
                reference=self.reference,
                temperature=temperature,
                estimator=self.kl.estimator,
                max_tokens=self.ppo.microbatch_tokens,
                values=self.ppo.advantage == "gae",
                final_values=self.ppo.bootstrap_truncated,
            )


def _require_one_temperature(sampling: SamplingConfig, device: torch.device) -> None:
    """Refuse a dial that was turned on some ranks alone: a buffer is that of all ranks.

    Raises:
        RolloutError: On all ranks.
    """
    own = sampling.temperature
    bounds = torch.tensor([own, -own], dtype=torch.float64, device=device)
    highest, lowest = all_reduce_max(bounds).tolist()
    if highest != -lowest:
        raise RolloutError(
            f"the dial `temperature` is {-lowest:g} on one rank and {highest:g} on another: a "
            "callback that turns it asks on every rank alike, for what `IterationStats` says."
        )


def _scored(result: RewardResult, rollout: Rollout) -> Tensor:
    """Responses with tokens and a usable score. ``[B]`` bool."""
    written = rollout.response_mask.any(1)
    return ~result.dropped.to(written.device) & written


def _token_scores(result: RewardResult, rollout: Rollout) -> Tensor | None:
    """Rewards per token at the tokens that they belong to. ``[B, R]``."""
    if result.token_rewards is None:
        return None
    mask = rollout.response_mask
    return spread_over(result.token_rewards.to(mask.device), mask)


def _beyond(limits: Limits, networks: NetworkScores, mask: Tensor) -> bool:
    """Whether the policy is beyond a bound on its KL to the reference, over all ranks."""
    if limits.kl_ref == limits.kl_ref_per_token == inf:
        return False
    log_ratio = (networks.logprobs - networks.ref_logprobs).double().masked_fill(~mask, 0)
    own = torch.stack([log_ratio.sum(), mask.any(1).sum().double(), mask.sum().double()])
    kl, responses, num_tokens = all_reduce_sum(own).tolist()
    return limits.beyond_reference(kl, responses=responses, tokens=num_tokens)
