"""The runs that the doctor is shown: sabotages of the stability experiment, and some more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from experiments.diagnosis.sabotage import (
    BlindReward,
    BlindsReward,
    LengthReward,
    SetsIn,
    TerseGold,
)
from experiments.stability.overlay import Overlay, merged
from experiments.stability.sabotage import EntropyPenalty
from experiments.stability.scenarios import FAULT_AT, SCENARIOS

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


def _of_stability(name: str, *accepted: str, onset: int = 0) -> Case:
    return Case(overlay=SCENARIOS[name].fault, accepted=accepted, onset=onset)


def _dropping(name: str, *accepted: str) -> Case:
    fault = SCENARIOS[name].fault
    settings = {"reward_processing": {"on_nonfinite": "drop"}}
    overlay = Overlay(reward=fault.reward, settings=settings, text=fault.text)
    return Case(overlay=overlay, accepted=accepted)


def _later(overlay: Overlay, *accepted: str, kl_price: float = 0.0) -> Case:
    """A fault that a run is well without until it sets in."""
    return Case(overlay=overlay, accepted=accepted, onset=FAULT_AT, kl_price=kl_price)


_UNHELD = ("reward_hacking", "over_optimisation")

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
        accepted=_UNHELD,
    ),
    "hacking_later": _later(
        Overlay(callbacks=lambda: [SetsIn(FAULT_AT, kl_coef=0.0)], text="β = 0 from then on"),
        *_UNHELD,
    ),
    "kl_runaway_later": _later(
        Overlay(
            callbacks=lambda: [SetsIn(FAULT_AT, kl_coef=0.05, clip_range=2.0, actor_lr_factor=2.0)],
            text="β ÷ 20, ε and rate × 2 from then on",
        ),
        *("kl_runaway", *_UNHELD),
    ),
    "entropy_collapse_later": _later(
        Overlay(
            callbacks=lambda: [EntropyPenalty(0.3, iteration=FAULT_AT)],
            text="entropy punished from then on",
        ),
        "entropy_collapse",
    ),
    "uninformative_later": _later(
        Overlay(
            reward=lambda reward: BlindReward(reward, is_blind=False),
            callbacks=lambda: [BlindsReward(FAULT_AT), SetsIn(FAULT_AT, kl_coef=0.05)],
            text="random reward, β ÷ 20 from then on",
        ),
        "no_reward_signal",
        kl_price=0.1,
    ),
    "divergence_later": _later(
        Overlay(callbacks=lambda: [SetsIn(FAULT_AT, kl_coef=0.1)], text="β ÷ 10 from then on"),
        *_UNHELD,
    ),
}
"""By name; the healthy one first. ``…_later`` are what takes its time, in a run that was well."""


def _world(
    *,
    tokens: int,
    prompts: int,
    minibatches: int,
    beta: float,
    rates: tuple[float, float],
    epochs: int | None = None,
    **size: int,
) -> Overlay:
    """Make a world of other lengths, buffers, β, rates (actor, critic) and sizes of the model."""
    settings: dict[str, dict[str, float]] = {
        "world": dict(size),
        "sampling": {"max_new_tokens": tokens},
        "buffer": {"num_prompts": prompts, "num_minibatches": minibatches},
        "kl": {"coef": beta},
        "actor": {"lr": rates[0]},
        "critic": {"lr": rates[1]},
    }
    return Overlay(settings=settings | ({"ppo": {"num_update_epochs": epochs}} if epochs else {}))


OTHER_WORLDS: Mapping[int, Overlay] = {
    1: _world(
        tokens=9,
        prompts=64,
        minibatches=2,
        beta=0.8,
        rates=(1e-3, 2e-3),
        num_hidden_layers=2,
        hidden_size=48,
        intermediate_size=64,
    ),
    2: _world(
        tokens=7,
        prompts=80,
        minibatches=2,
        epochs=3,
        beta=0.6,
        rates=(1.5e-3, 4e-3),
        hidden_size=40,
        intermediate_size=40,
    ),
    3: _world(
        tokens=5,
        prompts=128,
        minibatches=4,
        beta=0.6,
        rates=(1.5e-3, 4e-3),
        hidden_size=48,
        intermediate_size=64,
    ),
    4: _world(
        tokens=8,
        prompts=112,
        minibatches=4,
        beta=1.2,
        rates=(2e-3, 4e-3),
        num_hidden_layers=3,
        hidden_size=32,
        intermediate_size=48,
    ),
    5: _world(
        tokens=6,
        prompts=112,
        minibatches=2,
        epochs=3,
        beta=0.5,
        rates=(1e-3, 3e-3),
        hidden_size=56,
        intermediate_size=48,
    ),
    6: _world(
        tokens=7,
        prompts=96,
        minibatches=3,
        beta=0.8,
        rates=(1.5e-3, 3e-3),
        num_hidden_layers=3,
        hidden_size=40,
        intermediate_size=56,
    ),
    7: _world(
        tokens=5,
        prompts=80,
        minibatches=2,
        beta=0.6,
        rates=(2e-3, 5e-3),
        hidden_size=64,
        intermediate_size=64,
    ),
    8: _world(
        tokens=9,
        prompts=96,
        minibatches=2,
        beta=1.2,
        rates=(1.5e-3, 4e-3),
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
    ),
    9: _world(
        tokens=6,
        prompts=144,
        minibatches=3,
        beta=0.7,
        rates=(1.2e-3, 3e-3),
        num_hidden_layers=2,
        hidden_size=48,
        intermediate_size=48,
    ),
    10: _world(
        tokens=8,
        prompts=104,
        minibatches=2,
        epochs=3,
        beta=1.1,
        rates=(1e-3, 3e-3),
        hidden_size=56,
        intermediate_size=56,
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
