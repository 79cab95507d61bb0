"""Start-up review: settings that are allowed and seldom wise, each with what to try instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs import (
    BufferConfig,
    GroupConfig,
    KLConfig,
    PPOConfig,
    RewardProcessing,
    SamplingConfig,
)

Severity = Literal["note", "warning"]

FULL_RATES = (1e-7, 1e-5)
"""Usual learning rates of an actor whose weights are all trained; 1e-6 to 5e-6 most often."""

LORA_FACTOR = (10.0, 100.0)
"""Adapters take rates this many times as high."""

CRITIC_RATIO = (2.0, 5.0)
"""Usual rate of a critic's own network, in rates of the actor."""

WIDE_CRITIC_RATIO = (0.02, 100.0)
"""The same where the two are hard to compare: a critic that is a head, or an actor of adapters.
No usual range is known; these are the review's own bounds."""

SMALL_BUFFER = 512
"""Responses; below it a buffer is small, and above it large enough for more than four passes."""

SMALL_MODEL = 10_000_000
"""Parameters; the usual rates were found on models far above it, so they are not asked of toys."""

_SPREAD = (0.3, 3.0)  # of scores, for which the usual β is meant


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings and numbers that the review reads.

    Args:
        ppo: Objective and update epochs.
        kl: Penalty towards the reference.
        actor: The actor's learning rate.
        critic: The critic's learning rate.
        sampling: How responses are sampled.
        buffer: Size of the buffer; None where it is unknown.
        lora: Whether the actor trains adapters.
        shared_critic: Whether the critic is a head on the actor's trunk.
        num_parameters: Of the actor, frozen ones included; None where it is unknown.
        planned_steps: Optimiser steps of the run; None where it is unknown.
    """

    ppo: PPOConfig
    kl: KLConfig
    actor: GroupConfig
    critic: GroupConfig
    sampling: SamplingConfig
    buffer: BufferConfig | None = None
    lora: bool = False
    shared_critic: bool = False
    num_parameters: int | None = None
    planned_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing to look at.

    Args:
        key: The setting, as it stands in a config below ``model.init_args``.
        message: Its value, why it matters, and what to try.
        severity: ``warning`` is likely to hurt, ``note`` may well be meant.
    """

    key: str
    message: str
    severity: Severity = "warning"

    def __str__(self) -> str:
        return f"`{self.key}` {self.message}"


def review(settings: RunSettings) -> list[Advice]:
    """Look at the settings of a run before it starts.

    Returns:
        What was found, warnings first; empty for settings as they usually are.
    """
    rules: tuple[Callable[[RunSettings], Iterator[Advice]], ...] = (
        _update_epochs,
        _actor_rate,
        _critic_rate,
        _warmup,
        _truncated_sampling,
        _temperature,
        _kl_control,
    )
    found = [advice for rule in rules for advice in rule(settings)]
    return sorted(found, key=lambda advice: advice.severity == "note")


def review_scores(
    std: float, *, kl_coef: float, normalize: RewardProcessing | str = "none"
) -> list[Advice]:
    """Look at the spread of the first iteration's scores beside the KL penalty.

    Args:
        std: Spread of the scores over the responses, before normalisation.
        kl_coef: β in force.
        normalize: How scores are normalised, or the section that says so.
    """
    if std == 0:
        message = (
            "gave every response of the first iteration the same score: there is nothing to learn "
            "from. Test the reward on good against bad answers."
        )
        return [Advice(key="rewards", message=message)]
    unit = _unit(normalize)
    low, high = _SPREAD
    if kl_coef == 0 or unit is None or not std > 0 or low <= std / unit <= high:
        return []
    spread = std / unit
    weak = "weak" if spread > high else "strong"
    way_out = "`reward_processing.normalize: batch`"
    if unit != 1:
        way_out = f"`reward_processing.reference_std: {std:.2g}`"
    message = (
        f"is {kl_coef:g}, meant for scores of spread about 1, and theirs is {spread:.3g}: the "
        f"penalty is as {weak} as {kl_coef / spread:.2g} would be for such. Try "
        f"{kl_coef * spread:.2g}, or {way_out}."
    )
    return [Advice(key="kl.coef", message=message)]


def _unit(normalize: RewardProcessing | str) -> float | None:
    """What scores are divided by whatever they are; None if by their own spread, measured."""
    fixed = None if isinstance(normalize, str) else normalize.reference_std
    how = normalize if isinstance(normalize, str) else normalize.normalize
    return 1.0 if how == "none" else fixed


def advice_text(found: Iterable[Advice]) -> str:
    """Return a short text for the log, a line each; empty for none."""
    lines = [f"  {advice.severity}: {advice}" for advice in found]
    if not lines:
        return ""
    head = "Review of the settings (`guards.advice: off` silences it):"
    return "\n".join([head, *lines])


def _update_epochs(run: RunSettings) -> Iterator[Advice]:
    """Passes over a buffer fit it ever more closely, the sooner the smaller it is."""
    epochs, buffer = run.ppo.num_update_epochs, run.buffer
    responses = SMALL_BUFFER if buffer is None else buffer.num_responses
    most = 4 if responses < SMALL_BUFFER else 10
    if epochs > most:
        yield Advice(
            key="ppo.num_update_epochs",
            message=f"is {epochs} for a buffer of {responses} responses: later passes fit what "
            "only this buffer shows. Try 2 to 4, or a larger `data.init_args.buffer.num_prompts`.",
        )
    if run.ppo.target_kl is None and epochs > 1:
        yield Advice(
            key="ppo.target_kl",
            message=f"is off with {epochs} passes over each buffer: nothing ends an update that "
            "goes too far. Try 0.02.",
        )


def _actor_rate(run: RunSettings) -> Iterator[Advice]:
    low, high = _usual_rates(lora=run.lora)
    if _is_small(run) or low <= run.actor.lr <= high:
        return
    what = "adapters" if run.lora else "full training"
    risk = "policies collapse" if run.actor.lr > high else "nothing moves"
    yield Advice(
        key="actor.lr",
        message=f"is {run.actor.lr:g}; {what} usually take {low:g} to {high:g}, and {risk} "
        f"outside. Try {_inside(run.actor.lr, low, high):g}.",
    )


def _critic_rate(run: RunSettings) -> Iterator[Advice]:
    """A head alone, or a whole critic beside an actor's adapters, may well need another rate."""
    ratio = run.critic.lr / run.actor.lr
    low, high = CRITIC_RATIO
    how = "is usual"
    if run.shared_critic or run.lora:
        low, high = WIDE_CRITIC_RATIO
        how = "is what this review lets pass for a head or beside adapters"
    if low <= ratio <= high * (1 + 1e-9):
        return
    yield Advice(
        key="critic.lr",
        message=f"is {run.critic.lr:g}, {ratio:.3g} times the actor's; {low:g} to {high:g} times "
        f"{how}: a critic that lags makes noise of the advantages, one that is too fast jumps. "
        f"Try {run.actor.lr * _inside(ratio, low, high):g}.",
        severity="note" if 1 <= ratio <= 2 * high else "warning",
    )


def _warmup(run: RunSettings) -> Iterator[Advice]:
    for name, group in (("actor", run.actor), ("critic", run.critic)):
        if group.warmup == 0:
            yield Advice(
                key=f"{name}.warmup",
                message="is 0: the first steps, on Adam moments of a few gradients, are the "
                f"largest. Try {_tenth_of(run.planned_steps)}.",
                severity="note",
            )
        elif run.planned_steps is not None and group.warmup >= run.planned_steps:
            yield Advice(
                key=f"{name}.warmup",
                message=f"is {group.warmup} steps and the run has {run.planned_steps}: it never "
                f"reaches its learning rate. Try {_tenth_of(run.planned_steps)}.",
            )


def _truncated_sampling(run: RunSettings) -> Iterator[Advice]:
    off = {"top_p": run.sampling.top_p < 1, "top_k": run.sampling.top_k > 0}
    for name, active in off.items():
        if active:
            neutral = {"top_p": 1, "top_k": 0}[name]
            yield Advice(
                key=f"sampling.{name}",
                message=f"is {getattr(run.sampling, name)}: responses come from a cut "
                "distribution, while ratio and KL are of the whole one, so both are biased. "
                f"Try {neutral} for training.",
            )


def _temperature(run: RunSettings) -> Iterator[Advice]:
    temperature = run.sampling.temperature
    if 0.5 <= temperature <= 1.5:
        return
    effect = (
        "responses hardly vary, so there is little to learn from"
        if temperature < 0.5
        else "responses are near noise, and few of them are of use"
    )
    yield Advice(key="sampling.temperature", message=f"is {temperature:g}: {effect}. Try 0.7 to 1.")


def _kl_control(run: RunSettings) -> Iterator[Advice]:
    if run.kl.coef == 0:
        yield Advice(
            key="kl.coef",
            message="is 0: nothing keeps the policy near the reference, and what the reward misses "
            "is exploited. Try 0.05.",
            severity="note",
        )


def _usual_rates(*, lora: bool) -> tuple[float, float]:
    low, high = FULL_RATES
    return (low * LORA_FACTOR[0], high * LORA_FACTOR[1]) if lora else (low, high)


def _is_small(run: RunSettings) -> bool:
    return run.num_parameters is not None and run.num_parameters < SMALL_MODEL


def _inside(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _tenth_of(steps: int | None) -> str:
    return "a tenth of the run's steps" if steps is None else f"{max(1, steps // 10)}"
