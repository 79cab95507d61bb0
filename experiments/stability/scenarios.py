"""The sabotages, and what treats each of them.

A run is a plain setup with overlays: the sabotage, and in the variants with a mechanism
the settings and callbacks that fit. They are the same at every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from experiments.stability.sabotage import (
    ArmOutlier,
    BrokenReward,
    EntropyPenalty,
    NaNGradient,
    NaNWeight,
    OutlierReward,
    ScaledReward,
    ScaledValueHead,
    scores_unguarded,
    steps_unguarded,
)
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

ITERATIONS = 40
FAULT_AT = 10  # iteration of the faults that come once
LR = 3e-3

PLAIN: Settings = {
    "ppo": {"num_update_epochs": 2, "target_kl": None},
    "kl": {"coef": 0.5},
    "actor": {"lr": LR, "warmup": 8, "max_grad_norm": None},
    "critic": {"lr": 2 * LR, "warmup": 8, "max_grad_norm": None},
    "critic_model": {},
    "reward_processing": {"clip": None},
    "buffer": {"num_prompts": 64, "num_minibatches": 4},
}
"""Plain PPO: a penalty towards the reference, whitened advantages, and no further mechanism."""


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """What is laid over the plain setup.

    Args:
        settings: Of the config sections, by section.
        callbacks: Makes callbacks.
        reward: Wraps the reward.
        context: Entered for the whole run.
        text: For the table.
    """

    settings: Settings = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    reward: Callable[[Reward], Reward] = lambda reward: reward
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

    def changes(self, variant: str) -> list[Overlay]:
        """Return what makes up a variant: ``without``, ``all``, or one of ``remedies``."""
        if variant == "without":
            return [self.fault, self.without]
        return [self.fault, everything(self) if variant == "all" else self.remedies[variant]]

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the table."""
        return ["without", *self.remedies, "all"]


def merged(changes: list[Overlay]) -> dict[str, dict[str, Any]]:
    """Return the settings of all sections after the changes, the last one winning."""
    settings = {section: dict(values) for section, values in PLAIN.items()}
    for change in changes:
        for section, values in change.settings.items():
            settings[section] |= values
    return settings


def everything(scenario: Scenario) -> Overlay:
    """All mechanisms at once, with the same settings in every scenario."""
    penalised = merged([scenario.fault])["kl"]["coef"] > 0

    def callbacks() -> list[pl.Callback]:
        law = [AdaptiveKL(target=6.0, horizon=320)] if penalised else []  # it cannot move a β of 0
        return [
            *law,
            MaxKL(max_kl_ref=9.0),
            EntropyTarget(relative=0.7, rate=0.05, max_coef=0.3),
            ValueWarmup(num_iterations=3),
            BufferScheduler(),
            CheckpointRollback(),
            GoldEarlyStopping(patience=10),
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


SCENARIOS: Mapping[str, Scenario] = {
    "healthy": Scenario(fault=Overlay(text="none")),
    "actor_rate": Scenario(
        fault=Overlay(
            settings={"actor": {"lr": 120 * LR}},
            text="actor's rate × 120, no gradient clip",
        ),
        remedies={
            "rollback": Overlay(
                settings={"actor": {"max_grad_norm": 1.0}, "ppo": {"target_kl": 0.02}},
                callbacks=lambda: [CheckpointRollback(kl_coef_factor=1.0)],
                text="`max_grad_norm`, `target_kl`, `CheckpointRollback`",
            )
        },
    ),
    "hacking": Scenario(
        fault=Overlay(settings={"kl": {"coef": 0.0}}, text="β = 0, reward with a hole"),
        remedies={
            "gold_stop": Overlay(
                callbacks=lambda: [GoldEarlyStopping(patience=3), BestByGold(save_last=False)],
                text="`GoldEarlyStopping`, `BestByGold`",
            ),
            "kl_cap": Overlay(callbacks=lambda: [MaxKL(max_kl_ref=8.0)], text="`MaxKL`"),
        },
        hacking=True,
    ),
    "reward_scale": Scenario(
        fault=Overlay(reward=lambda reward: ScaledReward(reward, 1000.0), text="reward × 1000"),
        remedies={
            "normalize": Overlay(
                settings={"reward_processing": {"normalize": "reference", "clip": 10.0}},
                text="`reward_processing.normalize`, `clip`",
            )
        },
    ),
    "reward_outlier": Scenario(
        fault=Overlay(
            reward=OutlierReward,
            callbacks=lambda: [ArmOutlier(FAULT_AT)],
            text="one score of 1e6",
        ),
        remedies={
            "clip": Overlay(
                settings={"reward_processing": {"clip": 10.0}}, text="`reward_processing.clip`"
            )
        },
    ),
    "reward_nan": Scenario(
        fault=Overlay(reward=BrokenReward, text="reward NaN on some texts"),
        without=Overlay(context=scores_unguarded, text="guards on scores and steps taken out"),
        remedies={
            "drop": Overlay(
                settings={"reward_processing": {"on_nonfinite": "drop"}},
                text="`reward_processing.on_nonfinite: drop`",
            )
        },
    ),
    "value_head": Scenario(
        fault=Overlay(
            settings={"critic_model": {"head_init": "normal"}},
            callbacks=lambda: [ScaledValueHead(100.0)],
            text="value head × 100",
        ),
        remedies={
            "warmup": Overlay(
                settings={"ppo": {"value_clip_range": None}, "critic": {"max_grad_norm": 1.0}},
                callbacks=lambda: [ValueWarmup(num_iterations=8)],
                text="`ValueWarmup`",
            )
        },
    ),
    "nan_gradient": Scenario(
        fault=Overlay(callbacks=lambda: [NaNGradient(FAULT_AT)], text="a NaN in one gradient"),
        without=Overlay(context=steps_unguarded, text="guard on steps taken out"),
        remedies={"guard": Overlay(text="guard on steps (always on)")},
    ),
    "nan_weight": Scenario(
        fault=Overlay(callbacks=lambda: [NaNWeight(FAULT_AT)], text="a NaN in one weight"),
        remedies={
            "rollback": Overlay(
                callbacks=lambda: [CheckpointRollback()], text="`CheckpointRollback`"
            )
        },
    ),
    "overfit_buffer": Scenario(
        fault=Overlay(
            settings={
                "ppo": {"num_update_epochs": 16},
                "buffer": {"num_prompts": 8, "num_minibatches": 4},
            },
            text="K = 16, 8 responses",
        ),
        remedies={
            "scheduler": Overlay(
                settings={"ppo": {"target_kl": 0.02}},
                callbacks=lambda: [BufferScheduler(first="buffer", window=3, max_factor=8.0)],
                text="`target_kl`, `BufferScheduler`",
            )
        },
    ),
    "entropy_collapse": Scenario(
        fault=Overlay(
            callbacks=lambda: [EntropyPenalty(0.3)], text="entropy punished (wrong sign)"
        ),
        remedies={
            "target": Overlay(
                callbacks=lambda: [EntropyTarget(relative=0.8, rate=0.2, max_coef=0.4)],
                text="`EntropyTarget`",
            )
        },
    ),
    "kl_runaway": Scenario(
        fault=Overlay(
            settings={
                "kl": {"coef": 0.01},
                "ppo": {"clip_range": 0.4},
                "actor": {"lr": 3 * LR},
            },
            text="β ÷ 50, ε 0.4, rate × 3",
        ),
        remedies={
            "adaptive": Overlay(
                callbacks=lambda: [AdaptiveKL(target=5.0, horizon=64), MaxKL(max_kl_ref=8.0)],
                text="`AdaptiveKL`, `MaxKL`",
            )
        },
    ),
}
