"""How a run is put together: a plain setup, and what is laid over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from experiments.stability.world import MAX_NEW_TOKENS
from ppo_lightning.callbacks import (
    AdaptiveKL,
    BestByGold,
    BufferScheduler,
    CheckpointRollback,
    EntropyTarget,
    GoldEarlyStopping,
    MaxKL,
    ValueWarmup,
)
from ppo_lightning.rewards import Reward

Settings = Mapping[str, Mapping[str, Any]]

LR = 3e-3

PLAIN: Settings = {
    "ppo": {"num_update_epochs": 2, "target_kl": None},
    "kl": {"coef": 0.4},
    "actor": {"lr": LR, "warmup": 8, "max_grad_norm": None},
    "critic": {"lr": 2 * LR, "warmup": 8, "max_grad_norm": None},
    "critic_model": {},
    "reward_processing": {"clip": None},
    "world": {},
    "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
    "buffer": {"num_prompts": 96, "num_minibatches": 2},
}
"""Plain PPO: a penalty towards the reference, whitened advantages, and no further mechanism."""


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """What is laid over the plain setup.

    Args:
        settings: Of the config sections, by section.
        callbacks: Makes callbacks.
        reward: Wraps the reward.
        gold: Wraps the gold reward.
        context: Entered for the whole run.
        text: For the table.
    """

    settings: Settings = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    reward: Callable[[Reward], Reward] = lambda reward: reward
    gold: Callable[[Reward], Reward] = lambda gold: gold
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A sabotage.

    Args:
        fault: What is done, in all variants.
        without: Further overlay of the variant without any mechanism: guards taken away that are
            always there.
        remedies: The mechanisms that fit, by the name of the variant.
        hacking: The gold score may not fall from its best, instead of being compared with a
            healthy run's.
    """

    fault: Overlay
    without: Overlay = Overlay()
    remedies: Mapping[str, Overlay] = field(default_factory=dict)
    hacking: bool = False

    def overlays(self, variant: str) -> list[Overlay]:
        """Return what makes up a variant: ``without``, ``all``, or one of ``remedies``."""
        if variant == "without":
            return [self.fault, self.without]
        return [self.fault, everything(self) if variant == "all" else self.remedies[variant]]

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the table."""
        return ["without", *self.remedies, "all"]


def merged(overlays: Sequence[Overlay]) -> dict[str, dict[str, Any]]:
    """Return the settings of all sections after the overlays, the last one winning."""
    settings = {section: dict(values) for section, values in PLAIN.items()}
    for overlay in overlays:
        for section, values in overlay.settings.items():
            settings[section] |= values
    return settings


def everything(scenario: Scenario) -> Overlay:
    """All mechanisms at once, with the same settings in every scenario."""
    penalised = merged([scenario.fault])["kl"]["coef"] > 0

    def callbacks() -> list[pl.Callback]:
        law = AdaptiveKL(target=6.0, horizon=2000, max_coef=1.0)
        return [
            *([law] if penalised else []),  # it multiplies β, and cannot move one of 0
            MaxKL(max_kl_ref=8.0, action="rollback"),
            EntropyTarget(relative=0.7, rate=0.1, max_coef=0.3),
            ValueWarmup(num_iterations=3),
            BufferScheduler(),
            CheckpointRollback(kl_coef_from_zero=0.4, hold_iterations=10, max_rollbacks=10),
            GoldEarlyStopping(patience=15),
            BestByGold(save_last=False),
        ]

    clipped = {"max_grad_norm": 1.0}
    return Overlay(
        settings={
            "ppo": {"target_kl": 0.02},
            "actor": clipped,
            "critic": clipped,
            "reward_processing": {
                "clip": 10.0,
                "normalize": "reference",
                "on_nonfinite": "drop",
            },
        },
        callbacks=callbacks,
        text="all together",
    )
