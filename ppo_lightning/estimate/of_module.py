"""What a module, as a config makes it, takes memory for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppo_lightning.configs import BufferConfig
from ppo_lightning.estimate.process import maps_blocks
from ppo_lightning.estimate.run import Device, RewardModel, Run
from ppo_lightning.estimate.strategy import Strategy
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import SequenceClassifierReward


def run_of(
    module: PPOModule,
    *,
    buffer: BufferConfig,
    prompt_tokens: int,
    precision: str = "32-true",
    device: Device = "cpu",
    ranks: int = 1,
    strategy: Strategy | None = None,
) -> Run:
    """Gather what an estimate needs from a module; nothing is loaded.

    Args:
        module: As made, not yet configured.
        buffer: Of its data.
        prompt_tokens: Of the longest prompt.
        precision: Of the Trainer.
        device: What the networks lie on.
        ranks: Processes that share the responses.
        strategy: What else they share; None is nothing.
    """
    return Run(
        policy=module.policy,
        prompt_tokens=prompt_tokens,
        critic_model=module.critic_model,
        reference=module.reference_config,
        sampling=module.sampling,
        ppo=module.ppo,
        kl=module.kl,
        optimizer=module.optimizer_config,
        buffer=buffer,
        rewards=tuple(_reward_models(module)),
        precision=precision,
        device=device,
        ranks=ranks,
        strategy=strategy or Strategy(),
        mapped=maps_blocks(),
    )


def _reward_models(module: PPOModule) -> Iterator[RewardModel]:
    named: list[tuple[str, Any]] = [(t.name, t.component) for t in module.reward_pipeline.terms]
    for name, component in [*named, ("gold", module.gold)]:
        if isinstance(component, SequenceClassifierReward):
            yield RewardModel(
                name=name,
                path=component.path,
                dtype=component.dtype,
                batch_size=component.batch_size,
                batch_tokens=component.batch_tokens,
                max_length=component.max_length,
                quantization=component.quantization,
                trust_remote_code=component.trust_remote_code,
            )
