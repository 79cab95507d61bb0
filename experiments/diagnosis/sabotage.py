"""What is done to a run for the doctor alone: misleading rewards, and faults that set in later."""

from __future__ import annotations

import zlib
from typing import Any

import lightning.pytorch as pl

from ppo_lightning.modules import Request
from ppo_lightning.rewards import Reward
from ppo_lightning.types import Completions


class LengthReward(Reward):
    """Takes the number of words for quality."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        return [float(len(ids)) for ids in completions.response_ids]


class TerseGold(Reward):
    """The true score where words cost something: a quarter each, so that padding does not pay."""

    def __init__(self, gold: Reward) -> None:
        self.gold = gold

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        scores = zip(self.gold(completions), completions.response_ids, strict=True)
        return [float(score) - 0.25 * len(ids) for score, ids in scores]


class BlindReward(Reward):
    """Says something at random, the same for the same answer to the same prompt.

    Args:
        reward: Whose scores are given before it is blind.
        is_blind: Whether it is from the start.
    """

    def __init__(self, reward: Reward, *, is_blind: bool = True) -> None:
        self.reward, self.is_blind = reward, is_blind

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        if not self.is_blind:
            return [float(score) for score in self.reward(completions)]
        pairs = zip(completions.prompts, completions.responses, strict=True)
        return [zlib.crc32(f"{p}|{r}".encode()) / 2**32 * 3.4 for p, r in pairs]


class BlindsReward(pl.Callback):
    """A `BlindReward` is blind from one iteration on."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """Blind it; called by the module."""
        if name == "reward" and module.iteration >= self.iteration:
            module.reward_pipeline.terms[0].component.is_blind = True


class SetsIn(pl.Callback):
    """Multiplies dials from one iteration on, below whatever treats the run.

    Args:
        iteration: The first with the fault.
        factors: Dial to factor.
    """

    def __init__(self, iteration: int, **factors: float) -> None:
        self.iteration, self.factors = iteration, factors

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Ask for it; asked for again, nothing changes."""
        if pl_module.controls.iteration < self.iteration:
            return
        for dial, factor in self.factors.items():
            pl_module.controls.request(Request(source="SetsIn", dial=dial, factor=factor))
