"""Learning rates, schedules and the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_fields,
    require_positive,
    require_within,
)


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Learning rate of one network.

    Args:
        lr: Peak learning rate.
        warmup: Optimiser steps of linear warm-up from 0.
        schedule: After the warm-up. ``linear`` and ``cosine`` end with the run.
        min_lr_ratio: Where ``linear`` and ``cosine`` end, as a share of ``lr``.
        max_grad_norm: Gradients are scaled down to this norm; None turns clipping off.
    """

    lr: float = 1e-6
    warmup: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        require_fields(self)
        require_positive("lr", self.lr)
        require_at_least("warmup", self.warmup, 0)
        require_within("min_lr_ratio", self.min_lr_ratio, 0, 1)
        require_positive("max_grad_norm", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The one optimiser that holds both parameter groups.

    Args:
        name: Class in ``torch.optim``, or an import path (``my_package.MyOptimizer``).
        betas: Adam's moment decays.
        eps: Adam's ε; 1e-5 as in the PPO codes, 1e-4 when a run is unstable.
        weight_decay: Decay of the weights.
        options: Other arguments of the class. Of the three above it gets those that it has; a
            value given for one that it lacks is refused.
        lr_scaling: How both rates follow the size of a minibatch: ``none``, ``linear`` or ``sqrt``
            in responses of a minibatch over ``lr_batch_size``.
        lr_batch_size: Responses of a minibatch, over all ranks, that the rates are meant for.
        offload: Keep Adam's states on the CPU, which then computes the steps: eight bytes a trained
            weight less on the GPU, for slower steps. The numbers are the same up to rounding.
    """

    name: str = "AdamW"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    lr_batch_size: int | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("lr_batch_size", self.lr_batch_size, 1)
        require(
            (self.lr_scaling == "none") == (self.lr_batch_size is None),
            "`lr_scaling` and `lr_batch_size` belong together: set both or none.",
        )
        for beta in self.betas:
            require_within("betas", beta, 0, 1)
        require_positive("eps", self.eps)
        require_at_least("weight_decay", self.weight_decay, 0)

    def lr_scale(self, batch_size: float) -> float:
        """Factor on both learning rates.

        Args:
            batch_size: Responses of a minibatch, over all ranks.

        Source:
            Goyal et al. 2017, arXiv:1706.02677 (linear, for SGD); Malladi et al. 2022,
            arXiv:2205.10287 (square root, for Adam).
        """
        if self.lr_batch_size is None:
            return 1.0
        ratio = batch_size / self.lr_batch_size
        return ratio if self.lr_scaling == "linear" else ratio**0.5
