"""The sabotages, and what treats each of them; the same at every seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.stability.overlay import LR, Overlay, Scenario
from experiments.stability.sabotage import (
    ArmOutlier,
    BrokenReward,
    EntropyPenalty,
    FlooredReward,
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

ITERATIONS = 40
FAULT_AT = 10  # iteration of the faults that come once


def make_scenarios(fault_at: int = FAULT_AT) -> dict[str, Scenario]:
    """Return all scenarios by name.

    Args:
        fault_at: Iteration of the faults that come once.
    """
    return {
        "healthy": Scenario(fault=Overlay(text="none")),
        "actor_rate": _actor_rate(),
        "hacking": _hacking(),
        "kl_runaway": _kl_runaway(),
        "entropy_collapse": _entropy_collapse(),
        "overfit_buffer": _overfit_buffer(),
        "value_head": _value_head(),
        **_of_the_reward(fault_at),
        **_not_finite(fault_at),
    }


def _actor_rate() -> Scenario:
    """An actor's rate far too high."""
    return Scenario(
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
    )


def _hacking() -> Scenario:
    """Nothing that holds the policy near the reference."""
    return Scenario(
        fault=Overlay(settings={"kl": {"coef": 0.0}}, text="β = 0, reward with a hole"),
        remedies={
            "stop": Overlay(
                callbacks=lambda: [
                    GoldEarlyStopping(patience=3),
                    BestByGold(save_last=False),
                    MaxKL(max_kl_ref=6.0, action="stop_run"),
                ],
                text="`GoldEarlyStopping`, `BestByGold`, `MaxKL` (`stop_run`)",
            ),
            "go_on": Overlay(
                callbacks=lambda: [
                    MaxKL(max_kl_ref=6.0, action="rollback"),
                    CheckpointRollback(
                        kl_coef_from_zero=0.4, actor_lr_factor=1.0, critic_lr_factor=1.0
                    ),
                ],
                text="`MaxKL` (`rollback`), `CheckpointRollback`",
            ),
            "cap": Overlay(
                callbacks=lambda: [MaxKL(max_kl_ref=6.0)], text="`MaxKL` (`stop_update`) alone"
            ),
        },
        hacking=True,
    )


def _kl_runaway() -> Scenario:
    """A penalty too weak, and steps too large."""
    return Scenario(
        fault=Overlay(
            settings={
                "kl": {"coef": 0.02},
                "ppo": {"clip_range": 0.4},
                "actor": {"lr": 2 * LR},
            },
            text="β ÷ 20, ε 0.4, rate × 2",
        ),
        remedies={
            "rollback": Overlay(
                callbacks=lambda: [
                    MaxKL(max_kl_ref=8.0, action="rollback"),
                    CheckpointRollback(
                        kl_coef_factor=5.0,
                        max_kl_coef_factor=25.0,
                        clip_range_factor=0.5,
                        actor_lr_factor=0.5,
                        min_actor_lr_factor=0.5,
                        critic_lr_factor=1.0,
                        max_rollbacks=5,
                    ),
                ],
                text="`MaxKL` (`rollback`), `CheckpointRollback` of β, ε and rate",
            ),
            "adaptive": Overlay(
                settings={"ppo": {"target_kl": 0.02}},
                callbacks=lambda: [AdaptiveKL(target=5.0, horizon=48, min_coef=0.02, max_coef=1.0)],
                text="`AdaptiveKL`, `target_kl`",
            ),
        },
    )


def _entropy_collapse() -> Scenario:
    """An entropy bonus of the wrong sign."""
    return Scenario(
        fault=Overlay(
            callbacks=lambda: [EntropyPenalty(0.3)], text="entropy punished (wrong sign)"
        ),
        remedies={
            "target": Overlay(
                callbacks=lambda: [EntropyTarget(relative=0.8, rate=0.2, max_coef=0.4)],
                text="`EntropyTarget`",
            )
        },
    )


def _overfit_buffer() -> Scenario:
    """Many passes over few responses."""
    return Scenario(
        fault=Overlay(
            settings={
                "ppo": {"num_update_epochs": 16},
                "buffer": {"num_prompts": 8},
            },
            text="K = 16, 8 responses",
        ),
        remedies={
            "scheduler": Overlay(
                settings={"ppo": {"target_kl": 0.02}},
                callbacks=lambda: [BufferScheduler(first="buffer", window=2, max_factor=12.0)],
                text="`target_kl`, `BufferScheduler`",
            )
        },
    )


def _value_head() -> Scenario:
    """A value head that starts with absurd values."""
    return Scenario(
        fault=Overlay(
            settings={"critic_model": {"head_init": "normal"}},
            callbacks=lambda: [ScaledValueHead(100.0)],
            text="value head × 100",
        ),
        remedies={
            "warmup": Overlay(
                settings={"ppo": {"value_clip_range": None}, "critic": {"max_grad_norm": 1.0}},
                callbacks=lambda: [ValueWarmup(num_iterations=8)],
                text="`ValueWarmup`, gradient clip of the critic, no value clip",
            )
        },
    )


def _of_the_reward(fault_at: int) -> dict[str, Scenario]:
    """Faults of the scores."""
    return {
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
                callbacks=lambda: [ArmOutlier(fault_at)],
                text="one score of 1e6",
            ),
            remedies={
                "clip": Overlay(
                    settings={"reward_processing": {"clip": 10.0}}, text="`reward_processing.clip`"
                )
            },
        ),
    }


def _not_finite(fault_at: int) -> dict[str, Scenario]:
    """Numbers that are not finite."""
    return {
        "reward_nan": _dropped(BrokenReward, "reward NaN on a tenth of the texts"),
        "reward_nan_word": _dropped(_fails_on_a_word, "reward NaN on texts with one word"),
        "nan_gradient": Scenario(
            fault=Overlay(callbacks=lambda: [NaNGradient(fault_at)], text="a NaN in one gradient"),
            without=Overlay(context=steps_unguarded, text="guard on steps taken out"),
            remedies={"guard": Overlay(text="guard on steps (always on)")},
        ),
        "nan_weight": Scenario(
            fault=Overlay(callbacks=lambda: [NaNWeight(fault_at)], text="a NaN in one weight"),
            remedies={
                "rollback": Overlay(
                    callbacks=lambda: [CheckpointRollback(hold_iterations=3)],
                    text="`CheckpointRollback`",
                )
            },
        ),
    }


def _fails_on_a_word(reward: Reward) -> Reward:
    return BrokenReward(reward, word="who")


def _dropped(reward: Callable[[Reward], Reward], text: str) -> Scenario:
    """Scores that are NaN, with and without the guards."""
    drop = {"reward_processing": {"on_nonfinite": "drop"}}
    return Scenario(
        fault=Overlay(reward=reward, text=text),
        without=Overlay(
            settings=drop, context=scores_unguarded, text="guards on scores and steps taken out"
        ),
        remedies={
            "drop": Overlay(settings=drop, text="`reward_processing.on_nonfinite: drop`"),
            "floor": Overlay(reward=FlooredReward, text="a reward that says −1 there"),
        },
    )


SCENARIOS: Mapping[str, Scenario] = make_scenarios()
