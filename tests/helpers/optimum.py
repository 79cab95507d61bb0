"""Run the project's own pipeline on the exactly solvable problem, and score what it reaches."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
    KLConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.models import ModelInputs
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import RewardTerm
from ppo_lightning.rollout import RolloutDataModule
from tests.helpers.exact_problem import (
    MAX_TOKENS,
    ExactReward,
    Family,
    export_problem,
    make_problem,
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run reached.

    Args:
        problem: Seed of the problem.
        beta: KL coefficient.
        seed: Seed of the run.
        score: 0 is the reference, 1 the optimum.
        explained_variance: Of the critic against the exact values, by the policy's visits.
        cpu_seconds: Process time of the fit.
    """

    problem: int
    beta: float
    seed: int
    score: float
    explained_variance: float
    cpu_seconds: float


def exact_module(folder: Path, *, problem: int, beta: float, **overrides: Any) -> PPOModule:
    """A module for an exported problem; ``overrides`` replace single arguments."""
    settings: dict[str, Any] = {
        "policy": PolicyConfig(path=str(folder)),
        "critic_model": CriticConfig(),
        "rewards": [RewardTerm(name="exact", component=ExactReward(problem))],
        "sampling": SamplingConfig(max_new_tokens=MAX_TOKENS),
        "kl": KLConfig(coef=beta),
        "guards": GuardConfig(self_check="error", advice="off"),
    }
    return PPOModule(**(settings | overrides))


def solve(
    folder: Path,
    *,
    problem: int,
    beta: float,
    seed: int,
    iterations: int = 60,
    rollouts: int = 256,
    num_minibatches: int = 4,
    family: Family = "phi",
    **overrides: Any,
) -> Outcome:
    """Train on a problem, and compare with its optimum.

    Args:
        folder: For the exported problem.
        problem: Seed of the problem.
        beta: KL coefficient.
        seed: Seed of the run.
        iterations: PPO iterations.
        rollouts: Responses in an iteration.
        num_minibatches: Optimiser steps in one pass.
        family: Architecture.
        overrides: Arguments of ``PPOModule``.
    """
    exported = export_problem(folder, problem, family)
    overrides = {**TUNED, **overrides}
    module = exact_module(exported.model, problem=problem, beta=beta, **overrides)
    data = RolloutDataModule(
        str(exported.prompts),
        buffer=BufferConfig(num_prompts=rollouts, num_minibatches=num_minibatches),
        chat=False,
        seed=seed,
    )
    pl.seed_everything(seed, verbose=False)
    start = time.process_time()
    silent_trainer(folder, max_epochs=iterations).fit(module, data)
    cpu_seconds = time.process_time() - start
    score, explained = judge(module, problem=problem, beta=beta, family=family)
    return Outcome(
        problem=problem,
        beta=beta,
        seed=seed,
        score=score,
        explained_variance=explained,
        cpu_seconds=cpu_seconds,
    )


def silent_trainer(folder: Path, **settings: Any) -> pl.Trainer:
    """A trainer on one CPU that prints nothing, and writes ``metrics.jsonl`` into ``folder``."""
    quiet = {
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", devices=1, **(quiet | settings))


def judge(module: PPOModule, *, problem: int, beta: float, family: Family) -> tuple[float, float]:
    """Exact score of the actor, and explained variance of the critic."""
    assert module.networks is not None
    exact = make_problem(problem, family)
    actor: Any = module.networks.actor.eval()
    with torch.no_grad():
        policy = exact.policy_of(actor)
    score = exact.score(actor, beta=beta)
    return score, exact.critic_explained_variance(policy, _predictor(module), beta=beta)


def _predictor(module: PPOModule) -> Any:
    critic: Any = module.networks.critic  # type: ignore[union-attr]

    def predict(ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        return critic.all_values(ModelInputs(ids, mask, mask.cumsum(1) - 1))

    return predict


TUNED: dict[str, Any] = {
    "ppo": PPOConfig(
        clip_range=0.1,
        ent_coef=0.03,
        gae_lambda=0.95,
        num_update_epochs=8,
        target_kl=None,
        value_clip_range=None,
        whiten_advantages=False,
    ),
    "actor": GroupConfig(lr=2e-3, schedule="linear"),
    "critic": GroupConfig(lr=3e-3, schedule="linear"),
}
"""Settings that reached the scores of ``experiments/optimum``."""
