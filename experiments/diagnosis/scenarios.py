"""The runs that the doctor is shown: the sabotages of the stability experiment, and four more."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.stability.overlay import Overlay, merged
from experiments.stability.scenarios import FAULT_AT, SCENARIOS
from ppo_lightning.rewards import Reward
from ppo_lightning.types import Completions

ENDING = {"max_new_tokens": 16, "stop_strings": [".", "?", ",", ":", "was", "who", "the", "a"]}
"""Sampling whose answers end by themselves: after 7 tokens on average, at the start."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run that is healthy or ill.

    Args:
        overlay: What is done to the plain setup.
        accepted: Diagnoses that are right; none for a healthy run.
        onset: Iteration in which the fault is there.
        kl_price: Gold points that a nat per response costs where two runs are compared: 0 compares
            the gold score alone.
    """

    overlay: Overlay
    accepted: tuple[str, ...] = ()
    onset: int = 0
    kl_price: float = 0.0


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
    """Says something at random, the same for the same answer to the same prompt."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        pairs = zip(completions.prompts, completions.responses, strict=True)
        return [zlib.crc32(f"{p}|{r}".encode()) / 2**32 * 3.4 for p, r in pairs]


def _of_stability(name: str, *accepted: str, onset: int = 0) -> Case:
    return Case(overlay=SCENARIOS[name].fault, accepted=accepted, onset=onset)


def _dropping(name: str, *accepted: str) -> Case:
    fault = SCENARIOS[name].fault
    settings = {"reward_processing": {"on_nonfinite": "drop"}}
    overlay = Overlay(reward=fault.reward, settings=settings, text=fault.text)
    return Case(overlay=overlay, accepted=accepted)


CASES: Mapping[str, Case] = {
    "healthy": Case(overlay=Overlay(text="none")),
    "actor_rate": _of_stability("actor_rate", "update_too_large", "policy_collapse"),
    "hacking": _of_stability("hacking", "reward_hacking", "over_optimisation"),
    "kl_runaway": _of_stability("kl_runaway", "kl_runaway", "reward_hacking", "over_optimisation"),
    "entropy_collapse": _of_stability("entropy_collapse", "entropy_collapse"),
    "overfit_buffer": _of_stability("overfit_buffer", "overfit_buffer", "update_too_large"),
    "value_head": _of_stability("value_head", "critic_failure"),
    "reward_scale": _of_stability("reward_scale", "reward_scale"),
    "reward_outlier": _of_stability("reward_outlier", "reward_outlier", onset=FAULT_AT),
    "reward_nan": _dropping("reward_nan", "reward_nonfinite"),
    "reward_nan_word": _dropping("reward_nan_word", "reward_nonfinite"),
    "nan_gradient": _of_stability("nan_gradient", "nonfinite_update", onset=FAULT_AT),
    "nan_weight": _of_stability("nan_weight", "nonfinite_update", onset=FAULT_AT),
    "length": Case(
        overlay=Overlay(
            reward=LengthReward,
            gold=TerseGold,
            settings={"kl": {"coef": 0.05}, "sampling": ENDING},
            text="reward is the length",
        ),
        accepted=("length_exploitation", "reward_hacking"),
    ),
    "uninformative": Case(
        overlay=Overlay(reward=BlindReward, settings={"kl": {"coef": 0.02}}, text="random reward"),
        accepted=("no_reward_signal",),
        kl_price=0.1,
    ),
    "strong_beta": Case(
        overlay=Overlay(settings={"kl": {"coef": 40.0}}, text="β × 100"), accepted=("stalled",)
    ),
    "divergence": Case(
        overlay=Overlay(settings={"kl": {"coef": 0.04}}, text="β ÷ 10, reward with a hole"),
        accepted=("over_optimisation", "reward_hacking"),
    ),
}
"""By name; the healthy one first."""

OTHER_WORLDS: Mapping[int, Overlay] = {
    1: Overlay(
        settings={
            "world": {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 64},
            "sampling": {"max_new_tokens": 9},
            "buffer": {"num_prompts": 64, "num_minibatches": 2},
            "kl": {"coef": 0.8},
            "actor": {"lr": 1e-3},
            "critic": {"lr": 2e-3},
        }
    ),
    2: Overlay(
        settings={
            "world": {"hidden_size": 40, "intermediate_size": 40},
            "sampling": {"max_new_tokens": 7},
            "buffer": {"num_prompts": 80, "num_minibatches": 2},
            "ppo": {"num_update_epochs": 3},
            "kl": {"coef": 0.6},
            "actor": {"lr": 1.5e-3},
            "critic": {"lr": 4e-3},
        }
    ),
    3: Overlay(
        settings={
            "world": {"hidden_size": 48, "intermediate_size": 64},
            "sampling": {"max_new_tokens": 5},
            "buffer": {"num_prompts": 128, "num_minibatches": 4},
            "kl": {"coef": 0.6},
            "actor": {"lr": 1.5e-3},
            "critic": {"lr": 4e-3},
        }
    ),
    4: Overlay(
        settings={
            "world": {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48},
            "sampling": {"max_new_tokens": 8},
            "buffer": {"num_prompts": 112, "num_minibatches": 4},
            "kl": {"coef": 1.2},
            "actor": {"lr": 2e-3},
            "critic": {"lr": 4e-3},
        }
    ),
    5: Overlay(
        settings={
            "world": {"hidden_size": 56, "intermediate_size": 48},
            "sampling": {"max_new_tokens": 6},
            "buffer": {"num_prompts": 112, "num_minibatches": 2},
            "ppo": {"num_update_epochs": 3},
            "kl": {"coef": 0.5},
            "actor": {"lr": 1e-3},
            "critic": {"lr": 3e-3},
        }
    ),
    6: Overlay(
        settings={
            "world": {"num_hidden_layers": 3, "hidden_size": 40, "intermediate_size": 56},
            "sampling": {"max_new_tokens": 7},
            "buffer": {"num_prompts": 96, "num_minibatches": 3},
            "kl": {"coef": 0.8},
            "actor": {"lr": 1.5e-3},
            "critic": {"lr": 3e-3},
        }
    ),
    7: Overlay(
        settings={
            "world": {"hidden_size": 64, "intermediate_size": 64},
            "sampling": {"max_new_tokens": 5},
            "buffer": {"num_prompts": 80, "num_minibatches": 2},
            "kl": {"coef": 0.6},
            "actor": {"lr": 2e-3},
            "critic": {"lr": 5e-3},
        }
    ),
    8: Overlay(
        settings={
            "world": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64},
            "sampling": {"max_new_tokens": 9},
            "buffer": {"num_prompts": 96, "num_minibatches": 2},
            "kl": {"coef": 1.2},
            "actor": {"lr": 1.5e-3},
            "critic": {"lr": 4e-3},
        }
    ),
    9: Overlay(
        settings={
            "world": {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 48},
            "sampling": {"max_new_tokens": 6},
            "buffer": {"num_prompts": 144, "num_minibatches": 3},
            "kl": {"coef": 0.7},
            "actor": {"lr": 1.2e-3},
            "critic": {"lr": 3e-3},
        }
    ),
    10: Overlay(
        settings={
            "world": {"hidden_size": 56, "intermediate_size": 56},
            "sampling": {"max_new_tokens": 8},
            "buffer": {"num_prompts": 104, "num_minibatches": 2},
            "ppo": {"num_update_epochs": 3},
            "kl": {"coef": 1.1},
            "actor": {"lr": 1e-3},
            "critic": {"lr": 3e-3},
        }
    ),
}
"""Other sizes, lengths, buffers and rates, by the hundreds of the seeds: runs that no limit was
chosen with when they were made."""

SCALED = {("kl", "coef"), ("actor", "lr")}
"""Settings that a world has its own value of, and sabotages multiply."""

RELATIVE_FROM = 5
"""World from which on a sabotage of a rate or of β is one of the world's own, by the factor that it
has in the known world; before, it put them where they are there."""

OTHER_LENGTH = Overlay(settings={"sampling": ENDING | {"max_new_tokens": 24}})
"""On top of it where answers must be able to end."""


def in_world(fault: Overlay, number: int) -> list[Overlay]:
    """Return what makes up a sabotaged run of another world.

    Args:
        fault: The sabotage, with the values of the known world.
        number: Of the world.
    """
    world = OTHER_WORLDS[number]
    if number < RELATIVE_FROM:
        return [world, fault]
    moved = {
        section: {
            name: value * _own(world, section)[name] / _own(Overlay(), section)[name]
            if (section, name) in SCALED
            else value
            for name, value in settings.items()
        }
        for section, settings in fault.settings.items()
    }
    return [world, replace(fault, settings=moved)]


def _own(world: Overlay, section: str) -> Mapping[str, float]:
    return merged([world])[section]
