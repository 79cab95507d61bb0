"""Ask the engine for vLLM, and compare what it says with the trainer and the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from ppo_lightning.configs import LoraConfig, PolicyConfig, SamplingConfig
from ppo_lightning.models import attach_lora, load_causal_lm, policy_logprobs
from ppo_lightning.rollout import RolloutEngine, StopRules
from ppo_lightning.types import Rollout
from tests.helpers.scripted import prompt_batch

PROMPTS = [[5, 6, 7, 8], [11, 12], [13], [11, 12]]
OPEN = StopRules(end_ids=(), pad_id=0)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(PolicyConfig(path=str(folder))).to(dtype)


def with_adapter(
    folder: Path, *, rank: int = 3, trained: bool = True, dtype: torch.dtype = torch.float16
) -> Any:
    """A policy with an adapter, in the finest dtype in which vLLM runs one."""
    model = attach_lora(loaded(folder, dtype), LoraConfig(rank=rank, target_modules="all-linear"))
    if trained:
        change(model)
    return model


@torch.no_grad()
def change(model: Any, step: float = 0.1) -> None:
    """What an optimiser does: writes in place."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(torch.randn_like(weight), alpha=step)


def ask(
    engine: RolloutEngine,
    model: Any,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    version: int = 0,
    greedy: bool = False,
    stops: StopRules = OPEN,
    seed: int = 0,
    **sampling: Any,
) -> Rollout:
    return engine.generate(
        model,
        prompt_batch(prompts, seed=seed),
        sampling=SamplingConfig(**({"max_new_tokens": 6} | sampling)),
        stops=stops,
        policy_version=version,
        greedy=greedy,
    )


def same(one: Rollout, other: Rollout) -> None:
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert one.response_mask.tolist() == other.response_mask.tolist()
    assert one.truncated.tolist() == other.truncated.tolist()
    assert_close(one.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=1e-5)


def as_trained(rollout: Rollout, model: Any, temperature: float = 1.0) -> None:
    """The trainer's own log-probabilities are the sampler's, but for rounding."""
    coarse = next(model.parameters()).dtype != torch.float32
    with torch.no_grad():
        own = policy_logprobs(model, rollout.sequences, temperature=temperature).logprobs
    assert_close(rollout.sampler_logprobs, own, rtol=0, atol=0.02 if coarse else 1e-5)
