"""From a rollout to the buffer: score with the networks, shape rewards, estimate advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ppo_lightning.configs import KLConfig, KLEstimatorName, PPOConfig
from ppo_lightning.distributed import is_sharded, max_over_ranks, pulse
from ppo_lightning.functional import (
    full_kl,
    gae,
    group_zscore,
    kl_estimate,
    leave_one_out,
    token_rewards,
    whiten,
)
from ppo_lightning.models import ActorCritic, PolicyOutput
from ppo_lightning.rollout.minibatches import microbatch_rows
from ppo_lightning.types import Experience, Rollout, Sequences, TrunkStates

Reduce = Callable[[Tensor], Tensor]


class Reference(Protocol):
    """What the experience asks of the frozen reference."""

    def logprobs(
        self, sequences: Sequences, *, temperature: float, logits: bool = ...
    ) -> PolicyOutput:
        """Log-probabilities of the response tokens, without gradient."""
        ...


@dataclass(frozen=True, kw_only=True)
class NetworkScores:
    """What actor, critic and reference say of a rollout's tokens; all ``[B, R]``, 0 at padding.

    Args:
        logprobs: log π_old at the sampling temperature.
        entropy: Of the whole next-token distribution, nats.
        values: V before each token.
        ref_logprobs: log π_ref at the same temperature.
        kl: KL_t(π_old‖π_ref) by the configured estimator, nats.
        final_values: V after the last token, for truncated responses; None where nothing
            asks for it. ``[B]``.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    final_values: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ShapedRollout:
    """What shaping adds to the buffer, kept for the statistics of the iteration.

    Args:
        rewards: Token rewards, KL penalty included. ``[B, R]``.
        raw_advantages: Before whitening. ``[B, R]``.
        mask: Tokens that the losses count. ``[B, R]`` bool.
    """

    rewards: Tensor
    raw_advantages: Tensor
    mask: Tensor


def with_frozen_states(
    sequences: Sequences, networks: ActorCritic, *, max_tokens: int | None
) -> Sequences:
    """Run the actor's frozen blocks once for all passes over a buffer, in microbatches.

    Args:
        sequences: The rollout's tokens.
        networks: Actor and critic.
        max_tokens: Token budget of a microbatch.

    Returns:
        The sequences with what these blocks make of them; as they are where the actor has none.
    """
    if not networks.has_frozen_trunk:
        return sequences
    limit, packed = max_tokens or SCORING_TOKENS, networks.packs(sequences)
    groups = microbatch_rows(sequences, max_tokens=limit, packed=packed)
    return networks.with_frozen_states(sequences, groups)


def score_with_networks(
    sequences: Sequences,
    *,
    networks: ActorCritic,
    reference: Reference,
    temperature: float,
    estimator: KLEstimatorName,
    max_tokens: int | None,
    values: bool = True,
    final_values: bool = True,
) -> NetworkScores:
    """Run actor, critic and reference over the rollout, in microbatches.

    Args:
        sequences: The rollout's tokens.
        networks: Current actor and critic.
        reference: Frozen reference.
        temperature: Sampling temperature.
        estimator: Of the KL, see ``KLConfig``.
        max_tokens: Token budget of a microbatch.
        values: Whether to ask the critic; without, all values are 0.
        final_values: Whether to value the state after the last token too. Without, a shared
            trunk reads the very columns that it reads in the update.
    """
    whole = estimator == "full"

    def score(part: Sequences) -> dict[str, Tensor | None]:
        ours = networks(
            part,
            temperature=temperature,
            values=values,
            logits=whole,
            final_values=final_values,
        )
        theirs = reference.logprobs(part, temperature=temperature, logits=whole)
        kl = _kl(ours, theirs, part.response_mask, temperature=temperature, estimator=estimator)
        return {
            "logprobs": ours.logprobs,
            "entropy": ours.entropy,
            "values": torch.zeros_like(ours.logprobs) if ours.values is None else ours.values,
            "ref_logprobs": theirs.logprobs,
            "kl": kl,
            "final_values": ours.final_values,
        }

    packed, in_step = networks.packs(sequences), is_sharded(networks)
    found = score_in_parts(sequences, score, max_tokens=max_tokens, packed=packed, in_step=in_step)
    return NetworkScores(**found)


def finite_scores(networks: NetworkScores) -> tuple[NetworkScores, Tensor]:
    """Empty the rows that hold a number which is not finite: one would poison the whole buffer.

    Returns:
        ``(scores, finite)``: the same with 0 in such rows, and which rows are finite. ``[B]`` bool.
    """
    columns = {name: column for name, column in vars(networks).items() if column is not None}
    flags = [
        column.isfinite().flatten(1).all(1) if column.dim() > 1 else column.isfinite()
        for column in columns.values()
    ]
    finite = torch.stack(flags).all(0)
    cleaned = {
        name: column.masked_fill(~finite.view(-1, *[1] * (column.dim() - 1)), 0)
        for name, column in columns.items()
    }
    return NetworkScores(**cleaned), finite


SCORING_TOKENS = 8192
"""Most tokens of a pass without gradient where no budget is set: logits of all are kept at once."""


@torch.no_grad()
def score_in_parts(
    sequences: Sequences,
    score: Callable[[Sequences], Mapping[str, Tensor | None]],
    *,
    max_tokens: int | None,
    packed: bool,
    in_step: bool = False,
) -> dict[str, Tensor]:
    """Score sequences of similar length together, within a budget of tokens.

    Args:
        sequences: B rows.
        score: Maps some rows, trimmed, to ``[N, R']`` or ``[N]`` tensors by name; None is left out.
        max_tokens: Most tokens in a pass; None takes ``SCORING_TOKENS``.
        packed: Whether padding is left out, so that it does not count.
        in_step: Whether all ranks make equally many passes, as weights in shards need it; one that
            is short of rows, of which it has one at least, reads its first again.

    Returns:
        ``[B, R]`` or ``[B]`` by name, 0 where ``score`` said nothing.
    """
    shape = sequences.response_mask.shape
    columns: dict[str, Tensor] = {}
    limit = max_tokens or SCORING_TOKENS
    groups = microbatch_rows(sequences, max_tokens=limit, packed=packed)
    if in_step:
        wanted = max_over_ranks(len(groups), sequences.response_mask.device)
        groups += [torch.tensor([0])] * (wanted - len(groups))
    for rows in groups:
        pulse.beat()
        for name, value in score(sequences.select(rows).trimmed()).items():
            if value is None:
                continue
            column = columns.setdefault(name, value.new_zeros(shape[: value.dim()]))
            into = column[:, : value.shape[1]] if value.dim() > 1 else column
            into[rows.to(value.device)] = value
    return columns


def _kl(
    ours: PolicyOutput,
    theirs: PolicyOutput,
    mask: Tensor,
    *,
    temperature: float,
    estimator: KLEstimatorName,
) -> Tensor:
    """Per-token KL of one microbatch. ``[B, R]``."""
    if estimator == "full":
        assert ours.logits is not None
        assert theirs.logits is not None
        return full_kl(ours.logits, theirs.logits, temperature=temperature).masked_fill(~mask, 0)
    estimate = kl_estimate(ours.logprobs, theirs.logprobs, estimator=estimator)
    return estimate.masked_fill(~mask, 0)


def build_experience(
    rollout: Rollout,
    scores: Tensor,
    networks: NetworkScores,
    *,
    used: Tensor,
    ppo: PPOConfig,
    kl: KLConfig,
    kl_coef: float,
    reduce: Reduce,
    num_responses: int,
    iteration: int,
    token_scores: Tensor | None = None,
    trunk: TrunkStates | None = None,
) -> tuple[Experience, ShapedRollout]:
    """Shape token rewards, estimate advantages, whiten over the whole buffer.

    Args:
        rollout: Sampled responses.
        scores: Processed score of each response. ``[B]``.
        networks: Their log-probabilities and values.
        used: False for responses that take part in nothing (dropped). ``[B]`` bool.
        ppo: Discount, λ, bootstrapping and whitening.
        kl: Placement of the penalty.
        kl_coef: β in force.
        reduce: Sums a vector over ranks.
        num_responses: Responses over all ranks.
        iteration: Number of the iteration.
        token_scores: Rewards that belong to tokens, weighted. ``[B, R]``, or None.
        trunk: What the actor's frozen blocks make of the rollout, if the update is to begin there.
    """
    mask = rollout.response_mask & used[:, None]
    rewards = token_rewards(
        scores.masked_fill(~used, 0),
        networks.kl,
        mask,
        kl_coef=kl_coef,
        placement=kl.placement,
        token_scores=token_scores,
    )
    raw, returns = _advantages(rollout, rewards, networks, mask, ppo)
    raw = raw if ppo.advantage == "gae" else _compared(rewards, rollout, mask, ppo, reduce)
    experience = Experience(
        sequences=replace(rollout.sequences, response_mask=mask, trunk=trunk),
        old_logprobs=networks.logprobs,
        old_values=networks.values,
        ref_logprobs=networks.ref_logprobs,
        advantages=_whitened(raw, mask, ppo, reduce),
        returns=returns,
        indices=rollout.prompts.indices,
        num_responses=num_responses,
        iteration=iteration,
        policy_version=rollout.policy_version,
        temperature=rollout.temperature,
    )
    return experience, ShapedRollout(rewards=rewards, raw_advantages=raw, mask=mask)


def _whitened(raw: Tensor, mask: Tensor, ppo: PPOConfig, reduce: Reduce) -> Tensor:
    """Advantages of unit spread over the whole buffer, if so configured. ``[B, R]``."""
    if not ppo.whiten_advantages:
        return raw
    # A comparison has its own zero: responses that are all alike must teach nothing.
    return whiten(raw, mask, reduce=reduce, shift_mean=ppo.advantage == "gae")


def _compared(
    rewards: Tensor, rollout: Rollout, mask: Tensor, ppo: PPOConfig, reduce: Reduce
) -> Tensor:
    """Advantages without a critic: a response against the others to its prompt. ``[B, R]``."""
    law = leave_one_out if ppo.advantage == "rloo" else group_zscore
    found = law(rewards.sum(1), rollout.prompts.groups, mask.any(1), reduce=reduce)
    return found[:, None].expand_as(mask).masked_fill(~mask, 0).to(rewards.dtype)


def _advantages(
    rollout: Rollout, rewards: Tensor, networks: NetworkScores, mask: Tensor, ppo: PPOConfig
) -> tuple[Tensor, Tensor]:
    """Raw advantages and returns, each with its own λ. Both ``[B, R]``."""
    bootstrap = None
    if ppo.bootstrap_truncated:
        assert networks.final_values is not None
        bootstrap = networks.final_values.masked_fill(~rollout.truncated, 0)

    def estimate(gae_lambda: float) -> tuple[Tensor, Tensor]:
        return gae(
            rewards,
            networks.values,
            mask,
            gamma=ppo.gamma,
            gae_lambda=gae_lambda,
            bootstrap_values=bootstrap,
        )

    advantages, returns = estimate(ppo.gae_lambda)
    if ppo.value_gae_lambda is not None and ppo.value_gae_lambda != ppo.gae_lambda:
        returns = estimate(ppo.value_gae_lambda)[1]
    return advantages, returns
