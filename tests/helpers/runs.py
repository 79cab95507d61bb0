"""Tiny PPO runs through the Python API."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    GroupConfig,
    GuardConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import Reward, RewardTerm
from ppo_lightning.rollout import RolloutDataModule
from ppo_lightning.types import Completions

PROMPTS = [
    "the cat",
    "a dog ran",
    "hello world you",
    "the movie is",
    "i like it",
    "who are you",
    "no",
    "a red bird sat on the house",
    "what",
    "we saw a big tree",
]


class IdReward(Reward):
    """Pays for even token ids and for length: learnable, and made of ids alone."""

    def __call__(self, completions: Completions) -> Tensor:
        return torch.tensor(
            [sum(0.5 - (i % 2) for i in ids) + 0.01 * len(ids) for ids in completions.response_ids]
        )


def ppo_module(folder: Path, **overrides: Any) -> PPOModule:
    """A module for a tiny model, on the CPU in float32, quick and learning.

    Args:
        folder: Of the tiny model.
        overrides: Arguments of ``PPOModule``; dictionaries for ``ppo``, ``policy``,
            ``critic_model`` and ``sampling`` change single settings.
    """
    settings = {"num_update_epochs": 2, "target_kl": None} | overrides.pop("ppo", {})
    sampling = {"max_new_tokens": 6} | overrides.pop("sampling", {})
    policy = {"path": str(folder)} | overrides.pop("policy", {})
    return PPOModule(
        policy=PolicyConfig(**policy),
        critic_model=CriticConfig(**overrides.pop("critic_model", {})),
        rewards=overrides.pop("rewards", [RewardTerm(name="ids", component=IdReward())]),
        ppo=PPOConfig(**settings),
        sampling=SamplingConfig(**sampling),
        actor=overrides.pop("actor", GroupConfig(lr=1e-3)),
        critic=overrides.pop("critic", GroupConfig(lr=3e-3)),
        guards=overrides.pop("guards", GuardConfig(self_check="error", advice="off")),
        **overrides,
    )


def data_module(**overrides: Any) -> RolloutDataModule:
    """Ten prompts, eight responses an iteration, two minibatches."""
    buffer = {"num_prompts": 8, "num_minibatches": 2} | overrides.pop("buffer", {})
    settings: dict[str, Any] = {"prompts": PROMPTS, "chat": False, "seed": 3} | overrides
    return RolloutDataModule(buffer=BufferConfig(**buffer), **settings)


def trainer(folder: Path, **overrides: Any) -> pl.Trainer:
    """A silent trainer for three iterations that writes into ``folder``."""
    settings = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return pl.Trainer(**(settings | overrides))


class Recorder(pl.Callback):
    """Keeps what the hooks of a run were given."""

    def __init__(self) -> None:
        self.stats: list[Any] = []
        self.collected: list[Any] = []
        self.answers: list[Any] = []

    def on_rollout_end(self, trainer: Any, module: Any, collected: Any) -> None:
        self.collected.append(collected)

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.stats.append(stats)

    def on_answers(self, trainer: Any, module: Any, answers: Any) -> None:
        self.answers.append(answers)


def fit(
    folder: Path,
    model: PPOModule,
    data: RolloutDataModule,
    *,
    ckpt: Path | None = None,
    **options: Any,
) -> Recorder:
    """Seed, fit, and return what was recorded."""
    pl.seed_everything(0, verbose=False)
    recorder = Recorder()
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer(folder, callbacks=callbacks, **options).fit(model, data, ckpt_path=ckpt)
    return recorder


class PoisonedAt:
    """Makes the loss of chosen updates not finite, by way of the networks' output."""

    def __init__(self, module: PPOModule, calls: Container[int]) -> None:
        self.calls, self.count = calls, 0
        module.configure_model()
        assert module.networks is not None
        module.networks.register_forward_hook(self)

    def __call__(self, networks: Any, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or output.entropy is None:  # the critic's own pass
            return output
        self.count += 1
        if self.count not in self.calls:
            return output
        return output._replace(logprobs=output.logprobs * torch.nan)


def parameters(module: PPOModule) -> dict[str, Tensor]:
    """Copies of all parameters by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def sampled_ids(recorder: Recorder) -> list[dict[int, tuple[int, ...]]]:
    """Token ids of a rank's responses by their numbers, iteration by iteration."""
    return [
        dict(
            zip(c.experience.indices.tolist(), map(tuple, c.completions.response_ids), strict=True)
        )
        for c in recorder.collected
    ]


def logged(recorder: Recorder) -> list[dict[str, float]]:
    """What was logged, but for what differs between two runs: times and memory."""
    return [
        {k: v for k, v in s.to_log().items() if k[:4] not in ("time", "run/")}
        for s in recorder.stats
    ]


def merged_ids(found: list[Any]) -> list[dict[int, tuple[int, ...]]]:
    """Responses of all ranks, iteration by iteration.

    Args:
        found: Of each rank three things, of which the second is its ``sampled_ids``.
    """
    return [
        {number: ids for part in parts for number, ids in part.items()}
        for parts in zip(*(ids for _, ids, _ in found), strict=True)
    ]
