"""What is done to a run: faults in its rewards and networks, and its guards taken away."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch

from ppo_lightning.modules import updater
from ppo_lightning.modules.objective import Coefficients
from ppo_lightning.rewards import Reward, RewardPipeline, RewardResult
from ppo_lightning.types import Completions


class ScaledReward(Reward):
    """Multiplies another reward's scores."""

    def __init__(self, reward: Reward, factor: float) -> None:
        self.reward, self.factor = reward, factor

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        return [self.factor * float(score) for score in self.reward(completions)]


class BrokenReward(Reward):
    """Fails on some answers: their score is NaN.

    Args:
        reward: Whose scores these are.
        word: It fails on answers with this word; None takes one answer in ten, whatever it says.
    """

    def __init__(self, reward: Reward, *, word: str | None = None) -> None:
        self.reward, self.word = reward, word

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        scores = zip(completions.responses, self.reward(completions), strict=True)
        return [math.nan if self._fails(text) else float(score) for text, score in scores]

    def _fails(self, text: str) -> bool:
        if self.word is not None:
            return self.word in text.split()
        return zlib.crc32(text.encode()) % 10 == 0


class FlooredReward(Reward):
    """No sabotage but a remedy: says something low where another reward says NaN."""

    def __init__(self, reward: Reward, floor: float = -1.0) -> None:
        self.reward, self.floor = reward, floor

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        scores = [float(score) for score in self.reward(completions)]
        return [score if math.isfinite(score) else self.floor for score in scores]


class OutlierReward(Reward):
    """Gives one answer of the batch after `arm` a score of ``size``."""

    def __init__(self, reward: Reward, size: float = 1e6) -> None:
        self.reward, self.size = reward, size
        self.armed = False

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        scores = [float(score) for score in self.reward(completions)]
        if self.armed and scores:
            self.armed, scores[0] = False, self.size
        return scores


class ArmOutlier(pl.Callback):
    """Lets an `OutlierReward` loose on the buffer of one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """Arm it; called by the module."""
        if name == "reward" and module.iteration == self.iteration:
            module.reward_pipeline.terms[0].component.armed = True


class ScaledValueHead(pl.Callback):
    """The value head starts with weights far too large."""

    def __init__(self, factor: float = 100.0) -> None:
        self.factor = factor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Scale it; the optimiser holds the same tensors."""
        with torch.no_grad():
            for parameter in pl_module.networks.critic.head.parameters():
                parameter.mul_(self.factor)


class NaNGradient(pl.Callback):
    """One entry of the actor's gradient is NaN at the first step of one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration, self.done = iteration, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hang on to one weight's gradient."""

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            if self.done or pl_module.iteration != self.iteration:
                return gradient
            self.done, spoilt = True, gradient.clone()
            spoilt.view(-1)[0] = torch.nan
            return spoilt

        next(iter(pl_module.networks.actor_parameters())).register_hook(spoil)


class NaNWeight(pl.Callback):
    """One weight of the actor is NaN after the update of one iteration."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        """Spoil it; called by the module."""
        if stats.iteration == self.iteration:
            *_, last = module.networks.actor_parameters()
            last.data.view(-1)[0] = torch.nan


class EntropyPenalty(pl.Callback):
    """A wrong sign: the loss punishes entropy, whatever bonus is set besides.

    Args:
        coef: Weight of the punishment.
        iteration: The first with it.
    """

    def __init__(self, coef: float, *, iteration: int = 0) -> None:
        self.coef, self.iteration = coef, iteration

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the weight off every ``ent_coef`` that the update reads."""
        inner = pl_module.updater.coefficients

        def lowered() -> Coefficients:
            found: Coefficients = inner()
            coef = self.coef if pl_module.iteration >= self.iteration else 0.0
            return replace(found, ent_coef=found.ent_coef - coef)

        pl_module.updater.coefficients = lowered


@contextmanager
def steps_unguarded() -> Iterator[None]:
    """Take steps whose loss or gradient is not finite, as a loop without the guard would."""
    decide = updater.report_of

    def careless(*args: Any, **kwargs: Any) -> Any:
        report = decide(*args, **kwargs)
        return replace(report, decision="step") if report.decision == "nonfinite" else report

    with patch.object(updater, "report_of", careless):
        yield


@contextmanager
def scores_unguarded() -> Iterator[None]:
    """Let NaN scores into the buffer, and take the steps that follow from them.

    For a pipeline that would drop them (``on_nonfinite: drop``).
    """
    score = RewardPipeline.__call__

    def careless(self: RewardPipeline, *args: Any, **kwargs: Any) -> RewardResult:
        result = score(self, *args, **kwargs)
        scores = result.scores.masked_fill(result.dropped, math.nan)
        return replace(result, scores=scores, dropped=torch.zeros_like(result.dropped))

    with patch.object(RewardPipeline, "__call__", careless), steps_unguarded():
        yield
