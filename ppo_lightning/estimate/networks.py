"""The networks of a run without their weights, and the optimiser of those that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_lightning.estimate.run import RewardModel, Run
from ppo_lightning.estimate.tally import Blank, ByteTally
from ppo_lightning.models import (
    ActorCritic,
    ReferencePolicy,
    build_actor_critic,
    embedding_rows,
    load_reward_model,
)
from ppo_lightning.models.precision import quantise_linears
from ppo_lightning.models.skeleton import guess_frozen_trunk, guess_reading, without_weights
from ppo_lightning.modules.optim import build_optimizer

ELSEWHERE = "elsewhere"
"""What does not lie where the networks do; no part of an estimate."""


@dataclass(frozen=True, kw_only=True)
class Networks:
    """What lies in memory from the load to the end.

    Args:
        trained: Actor and critic.
        reference: The frozen policy.
        scorers: Learned rewards with their models.
        optimizer: Its states are filled.
        vocabulary: Width of the actor's logits.
        offloaded: Whether the optimiser's states lie elsewhere than the networks.
        reference_away: Whether the reference does.
    """

    trained: ActorCritic
    reference: ReferencePolicy
    scorers: tuple[tuple[RewardModel, nn.Module], ...]
    optimizer: Optimizer
    vocabulary: int
    offloaded: bool = False
    reference_away: bool = False

    @classmethod
    def build(cls, run: Run, blank: Blank) -> Networks:
        """Make the networks of a run.

        Args:
            run: Its settings.
            blank: Makes what stands for the weights.

        Raises:
            ModelError: A model that is named is not there or of the wrong kind.
        """
        with without_weights():
            trained = build_actor_critic(run.policy, run.critic_model)
            reference = ReferencePolicy.build(run.reference, run.policy, trained.actor)
            scorers = tuple((model, _scorer(model)) for model in run.rewards)
        trained.train()
        with reference.causal_lm() as frozen:
            trunks = [trained.causal_lm, frozen]
        if trained.critic is not None:
            trunks.append(trained.critic.backbone)
        for trunk in {id(trunk): trunk for trunk in trunks}.values():
            guess_reading(trunk, packing=run.policy.padding_free, narrow=_leaves_tokens_out(run))
        if run.policy.cache_frozen_trunk:
            guess_frozen_trunk(trained.causal_lm)
        for network in (trained, frozen, *(model for _, model in scorers)):
            blank.fill(network)
        return cls(
            trained=trained,
            reference=reference,
            scorers=scorers,
            optimizer=_optimizer(run, trained),
            offloaded=run.optimizer.offload and run.device != "cpu",
            reference_away=run.reference.device not in ("auto", run.device, f"{run.device}:0"),
            vocabulary=embedding_rows(trained.causal_lm),
        )

    def claim(self, tally: ByteTally) -> None:
        """Count all weights and states, by what they are of."""
        trained = self.trained
        tally.claim(_weights(trained.actor), "actor")
        for part in (trained.critic, trained.value_head):
            if part is not None:
                tally.claim(_weights(part), "critic")
        if not self.reference.adapter_off:
            with self.reference.causal_lm() as model:
                tally.claim(_weights(model), ELSEWHERE if self.reference_away else "reference")
        for _, model in self.scorers:
            tally.claim(_weights(model), "reward models")
        kind = ELSEWHERE if self.offloaded else "optimiser states"
        tally.claim(_states(self.optimizer), kind)


def _leaves_tokens_out(run: Run) -> bool:
    """Whether last blocks may: they compute all tokens where they are compiled or in shards."""
    return run.policy.fused_layers and not (run.policy.compile or run.strategy.cuts_weights)


def _scorer(model: RewardModel) -> nn.Module:
    network, _ = load_reward_model(
        model.path, dtype=model.dtype, trust_remote_code=model.trust_remote_code
    )
    if model.quantization is not None:
        quantise_linears(network, model.quantization)
    return network


def _optimizer(run: Run, trained: ActorCritic) -> Optimizer:
    return build_optimizer(
        list(trained.actor_parameters()),
        list(trained.critic_parameters()),
        config=run.optimizer,
        actor_lr=1e-6,
        critic_lr=1e-6,
    )


def _weights(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from network.buffers()


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
