"""One optimiser with two named groups, their schedules, and clipping for each."""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ppo_lightning.configs import GroupConfig, OptimizerConfig
from ppo_lightning.distributed import (
    is_part,
    is_shard,
    local,
    num_copies,
    sum_over_ranks,
    world_size,
)
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.functional import lr_factor
from ppo_lightning.modules.offload import OffloadedAdam

_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_UNUSABLE = (torch.optim.LBFGS, torch.optim.SparseAdam)
_COARSE = (torch.bfloat16, torch.float16)


def build_optimizer(
    actor: Sequence[torch.nn.Parameter],
    critic: Sequence[torch.nn.Parameter],
    *,
    config: OptimizerConfig,
    actor_lr: float,
    critic_lr: float,
) -> Optimizer:
    """Build PPO's optimiser, over the groups ``actor`` and ``critic``.

    Args:
        actor: Trainable parameters of the actor.
        critic: Trainable parameters of the critic.
        config: Class and its arguments.
        actor_lr: Peak learning rate of the actor.
        critic_lr: Peak learning rate of the critic.

    Raises:
        ConfigError: As ``optimizer_over``.
    """
    refuse_coarse("actor", "`policy.dtype`", actor)
    refuse_coarse("critic", "`critic_model.dtype` (or `policy.dtype`)", critic)
    return optimizer_over({"actor": (actor, actor_lr), "critic": (critic, critic_lr)}, config)


def optimizer_over(
    groups: Mapping[str, tuple[Sequence[torch.nn.Parameter], float]], config: OptimizerConfig
) -> Optimizer:
    """Build an optimiser over named groups.

    Adam's state is filled at once (step 0, zero moments, the same as its lazy start), so that
    every checkpoint has the same entries whichever group has stepped.

    Args:
        groups: Trainable parameters and peak learning rate, by the group's name.
        config: Class and its arguments.

    Raises:
        ConfigError: An unknown class, a setting that it lacks, or one that cannot be offloaded.
    """
    cls = _optimizer_class(config.name)
    options = {**_settings_for(cls, config), **config.options}
    _check_options(cls, config.options, [f"`{name}.lr`" for name in groups])
    entries = [
        {"params": list(params), "lr": lr, "name": name} for name, (params, lr) in groups.items()
    ]
    if config.offload:
        _require_adam(cls)
    try:
        build = partial(OffloadedAdam, cls=cls) if config.offload else cls
        optimizer = build(entries, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"`optimizer`: {cls.__name__} refuses its settings: {error}") from error
    if issubclass(cls, _FUSED):
        for group in optimizer.param_groups:
            fill_adam_state(optimizer, group["params"], group["amsgrad"])
    return optimizer


def refuse_coarse(name: str, setting: str, weights: Sequence[torch.nn.Parameter]) -> None:
    """Refuse trained weights coarser than float32.

    A step of 1e-6 is lost in a bfloat16 weight: numbers of that kind lie some 0.5 % apart.

    Args:
        name: Of the network.
        setting: That its dtype comes from.
        weights: Trained.

    Raises:
        ConfigError: One is coarser.
    """
    coarse = {str(p.dtype).removeprefix("torch.") for p in weights if p.dtype in _COARSE}
    if coarse:
        raise ConfigError(
            f"{setting}: the {name}'s weights are {', '.join(sorted(coarse))}, in which most steps "
            "of training are rounded away. Set float32, with `trainer.precision: bf16-mixed` to "
            "compute in bfloat16; or train adapters (`policy.lora`), whose frozen base may be "
            "bfloat16."
        )


def _settings_for(cls: type[Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """Those of the settings that the class has; others must be at their defaults."""
    accepted = inspect.signature(cls).parameters
    settings: dict[str, Any] = {"fused": True} if issubclass(cls, _FUSED) else {}
    for name in ("betas", "eps", "weight_decay"):
        value = getattr(config, name)
        if name in accepted and _alike(accepted[name].default, value):
            settings[name] = value
        elif value != getattr(OptimizerConfig(), name):
            raise ConfigError(
                f"`optimizer.{name}`: {cls.__name__} has no such setting, or one of another kind; "
                "leave it out, and give what the class takes under `optimizer.options`."
            )
    return settings


def _check_options(cls: type[Optimizer], options: Mapping[str, Any], rates: Sequence[str]) -> None:
    """Refuse an option by name: a rate, or one that the class does not take."""
    if "lr" in options:
        raise ConfigError(
            f"`optimizer.options.lr` would be the rate of nothing: set {' and '.join(rates)}."
        )
    accepted = inspect.signature(cls).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return
    known = [name for name in accepted if name not in ("params", "lr")]
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean `{near}`?" if near else "."
            raise ConfigError(
                f"`optimizer.options.{name}`: {cls.__name__} has no such setting{hint} "
                f"It has {', '.join(known)}."
            )


def _alike(default: object, value: object) -> bool:
    """Whether a class means the same kind of thing: Adafactor's ``eps``, say, is a pair."""
    if default is inspect.Parameter.empty:
        return True
    return isinstance(default, tuple) == isinstance(value, tuple | list)


def _optimizer_class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`optimizer.name` must be a class of torch.optim or an import path, got {name!r}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"`optimizer.name`: {name!r} is not a torch optimiser.")
    if found is Optimizer or inspect.isabstract(found):
        raise ConfigError(f"`optimizer.name`: {name!r} is a base class; name an optimiser.")
    if issubclass(found, _UNUSABLE):
        raise ConfigError(
            f"`optimizer.name`: {name!r} cannot be used here: LBFGS evaluates the loss "
            "several times a step, and SparseAdam takes sparse gradients only. `AdamW` is the "
            "default."
        )
    return found


def _require_adam(cls: Any) -> None:
    """Refuse to offload the states of another class."""
    if cls not in _FUSED:
        raise ConfigError(
            f"`optimizer.offload` is for Adam and AdamW, and `optimizer.name` is {cls.__name__}: "
            "leave `offload` out, or set `name: AdamW`."
        )


def fill_adam_state(optimizer: Optimizer, parameters: Sequence[Tensor], amsgrad: bool) -> None:
    """Fill Adam's state of some parameters as it is before the first step."""
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = {"step": step} | {
            name: torch.zeros_like(parameter) for name in moments
        }


def build_scheduler(
    optimizer: Optimizer,
    *,
    actor: GroupConfig,
    critic: GroupConfig,
    total_steps: int | None,
    factors: Callable[[str], float],
    rested: Callable[[str], int] = lambda name: 0,
) -> LambdaLR:
    """Schedule both groups of PPO; see ``scheduler_over``."""
    groups = {"actor": actor, "critic": critic}
    return scheduler_over(
        optimizer, groups, total_steps=total_steps, factors=factors, rested=rested
    )


def scheduler_over(
    optimizer: Optimizer,
    groups: Mapping[str, GroupConfig],
    *,
    total_steps: int | None,
    factors: Callable[[str], float] = lambda name: 1.0,
    rested: Callable[[str], int] = lambda name: 0,
) -> LambdaLR:
    """Schedule all groups over *planned* optimiser steps, taken or not.

    Args:
        optimizer: Its groups in the order of ``groups``.
        groups: Warm-up and schedule by the group's name.
        total_steps: Planned steps of the whole run; None where it has no end.
        factors: Factor on a group's rate that is in force now, by the group's name.
        rested: Planned steps of the run so far in which a group, by name, was not to be trained:
            its schedule counts the others, and ends with the run all the same.

    Raises:
        ConfigError: A schedule that ends with the run, in a run without end.
    """
    for name, group in groups.items():
        if group.schedule != "constant" and total_steps is None:
            raise ConfigError(
                f"`{name}.schedule: {group.schedule}` needs an end: set `trainer.max_epochs`."
            )

    def law(name: str, group: GroupConfig) -> Callable[[int], float]:
        def factor(step: int) -> float:
            idle = rested(name)
            scheduled = lr_factor(
                max(0, step - idle),  # torch asks for step 0 when a run is resumed
                warmup_steps=group.warmup,
                total_steps=None if total_steps is None else max(0, total_steps - idle),
                schedule=group.schedule,
                min_ratio=group.min_lr_ratio,
            )
            return scheduled * factors(name)

        return factor

    return LambdaLR(optimizer, [law(name, group) for name, group in groups.items()])


def advance(scheduler: Any) -> None:
    """Go one planned step further, whether or not the optimiser's step was taken."""
    with warnings.catch_warnings():
        # torch warns when the very first optimiser step was skipped; that is meant here.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        scheduler.step()


def refresh(scheduler: LambdaLR) -> None:
    """Set the rates anew where the schedule stands: factors may have changed since it got there."""
    groups = scheduler.optimizer.param_groups
    for group, base, law in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * law(scheduler.last_epoch)


def collect_gradients(optimizer: Any) -> None:
    """Have an optimiser that sums gradients up for itself bring them to its groups' parameters."""
    getattr(optimizer, "collect_gradients", lambda: None)()


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    """Euclidean norm of the gradients, of all shards together; 0 where there is none. 0-d float."""
    given = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in given if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    if all(is_part(parameter) for parameter in given):
        return sum_over_ranks(torch.nn.utils.get_total_norm(gradients).double().square()).sqrt()
    if not is_shard(gradients[0]):
        return torch.nn.utils.get_total_norm(gradients)
    own: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        own.setdefault(num_copies(gradient, world_size()), []).append(local(gradient))
    norms = {copies: torch.nn.utils.get_total_norm(parts) for copies, parts in own.items()}
    squares = [norm.double().square() / copies for copies, norm in norms.items()]
    return sum_over_ranks(torch.stack(squares).sum()).sqrt().to(local(gradients[0]))


def drop_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Leave a group out of the next step: a rate of 0 would still move Adam's moments."""
    for parameter in parameters:
        parameter.grad = None


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], *, max_norm: float | None, norm: Tensor
) -> None:
    """Scale the gradients of one network down to ``max_norm``.

    Args:
        parameters: Of one group.
        max_norm: Bound; None leaves them alone.
        norm: Their norm, from ``gradient_norm``.
    """
    if max_norm is None or float(norm) <= max_norm or not math.isfinite(float(norm)):
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
