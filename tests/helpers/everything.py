"""A tiny run with every mechanism of stability on, and a spike in it that is rolled back."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ppo_lightning.callbacks import (
    ActorEMA,
    AdaptiveKL,
    BufferScheduler,
    CheckpointRollback,
    EntropyTarget,
    MaxKL,
    PullBack,
    RefreshReference,
    ValueWarmup,
)
from ppo_lightning.configs import (
    Constraint,
    GroupConfig,
    KLConfig,
    PTXConfig,
    RewardProcessing,
    WeightSchedule,
)
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import ResponseLength, RewardTerm, TokenRepetitionPenalty
from ppo_lightning.rollout import RolloutDataModule
from tests.helpers.faults import RateSpike
from tests.helpers.runs import IdReward, data_module, ppo_module

ITERATIONS = 7
SPIKE = 4
TEXTS = ["the cat sat on the red house", "we saw a big bird"]


def every_reward() -> list[RewardTerm]:
    """A weight that moves, a reward per token, and a constraint that is broken at first."""
    return [
        RewardTerm(
            name="ids",
            component=IdReward(),
            weight=WeightSchedule(start=1.0, end=0.8, iterations=4, delay=1),
        ),
        RewardTerm(name="repetition", component=TokenRepetitionPenalty(n=2), weight=0.1),
        RewardTerm(
            name="length",
            component=ResponseLength(),
            constraint=Constraint(bound=5.5, lr=0.05, damping=0.1),
        ),
    ]


def module_with_everything(model_dir: Path) -> PPOModule:
    """A module whose rewards and update have every part."""
    return ppo_module(
        model_dir,
        rewards=every_reward(),
        ppo={"target_kl": 0.05, "extra_critic_epochs": 1, "ent_coef": 1e-3},
        kl=KLConfig(coef=0.05),
        actor=GroupConfig(lr=1e-3, warmup=3, schedule="cosine"),
        critic=GroupConfig(lr=3e-3, warmup=1, schedule="linear"),
        reward_processing=RewardProcessing(normalize="running", on_nonfinite="drop"),
        ptx=PTXConfig(texts=TEXTS, coef=0.1, batch_size=2, max_length=8, every_n_iterations=2),
    )


def data_with_everything() -> RolloutDataModule:
    """Two responses to a prompt, a buffer sized in tokens, and held-out prompts."""
    buffer = {"num_prompts": 4, "responses_per_prompt": 2, "num_tokens": 48}
    return data_module(buffer=buffer, val_prompts=["the cat"])


def every_callback() -> list[pl.Callback]:
    """All that steer, guard, average and go back."""
    return [
        RateSpike(SPIKE),
        ValueWarmup(num_iterations=1),
        AdaptiveKL(target=0.05, horizon=40),
        MaxKL(max_kl_ref=5.0, action="stop_update"),
        EntropyTarget(relative=1.0, rate=0.01),
        BufferScheduler(window=2, frequent=0.5, patience=2),
        CheckpointRollback(storage="disk", hold_iterations=1),
        PullBack(every_n_iterations=3, weight=0.1),
        RefreshReference(every_n_iterations=2),
        ActorEMA(decay=0.9),
    ]


KEPT = ("ActorEMA", "BufferScheduler", "CheckpointRollback", "RefreshReference")
"""Callbacks whose states are part of what a run leaves."""


def state_of(trainer: Any, module: PPOModule, present: Container[str] = KEPT) -> dict[str, Any]:
    """All that a run leaves: weights, moments, dials and journal, and the callbacks' states."""
    callbacks = {type(c).__name__: c.state_dict() for c in trainer.callbacks}
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    return {
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "optimizer": optimizer.state_dict()["state"],
        "controls": module.controls.state_dict(),
        "rewards": module.reward_pipeline.state_dict(),
        "data": trainer.datamodule.state_dict(),
        "global_step": trainer.global_step,
        "callbacks": {name: callbacks[name] for name in KEPT if name in present},
    }


def without_times(value: Any) -> Any:
    """Drop what differs between two runs of the same numbers: seconds and memory."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not _of_the_machine(k)}
        return {k: without_times(v) for k, v in kept.items()}
    if isinstance(value, list | tuple):
        return [without_times(item) for item in value]
    return value


def _of_the_machine(key: Any) -> bool:
    return isinstance(key, str) and (key.startswith("time/") or key == "run/memory_gib")


def save_state(trainer: Any, module: PPOModule, path: Path) -> None:
    """Write ``state_of`` a run to a file."""
    torch.save(without_times(state_of(trainer, module)), path)
