"""The second half of an iteration: the optimiser steps, one for each minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import GroupConfig
from ppo_lightning.distributed import all_reduce_max, world_size
from ppo_lightning.modules.controls import Controls
from ppo_lightning.modules.decision import Limits, StepReport, report_of
from ppo_lightning.modules.guards import SelfCheck
from ppo_lightning.modules.objective import Coefficients, Terms
from ppo_lightning.modules.optim import clip_gradients, drop_gradients, gradient_norm
from ppo_lightning.modules.passes import Part, pass_plan
from ppo_lightning.modules.text_mix import TextMix
from ppo_lightning.modules.update import Objective, accumulate_gradients, kl_old_of
from ppo_lightning.types import MiniBatch

_IDLE: dict[Part, str | None] = {"both": None, "actor": "critic", "critic": "actor"}


@dataclass(kw_only=True)
class Updater:
    """Takes the steps of an update, and remembers how far it got.

    Args:
        objective: Networks and loss.
        controls: Coefficients and bounds in force.
        groups: Settings of the parameter groups ``actor`` and ``critic``.
        self_check: Ratio 1 at the first minibatch.
        text_mix: Language modelling beside PPO, or None.
    """

    objective: Objective
    controls: Controls
    groups: Mapping[str, GroupConfig]
    self_check: SelfCheck
    text_mix: TextMix | None = None

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin the update of a new buffer."""
        self.stopped = False
        self.checked = False
        self.num_skipped = 0  # planned steps that a stop left out, the stopped one included

    def part(self, batch: MiniBatch) -> Part | None:
        """Say what a minibatch trains; None where it is left out.

        A stop by the KL is the actor's: the critic's extra passes are made all the same.
        """
        ppo, epochs = self.objective.ppo, int(self.controls["num_update_epochs"])
        plan = pass_plan(ppo, epochs=epochs, train_actor=self.trains_actor)
        if batch.epoch >= len(plan):
            return None
        if self.stopped and batch.epoch < len(plan) - ppo.extra_critic_epochs:
            self.num_skipped += 1
            return None
        return plan[batch.epoch]

    @property
    def trains_actor(self) -> bool:
        """Whether the actor is trained in this iteration."""
        return self.controls["train_actor"] > 0

    def step(
        self,
        batch: MiniBatch,
        part: Part,
        *,
        optimizer: Any,
        backward: Callable[[Tensor], None],
        dtype: torch.dtype,
    ) -> tuple[Terms, StepReport]:
        """One forward and backward over the minibatch, then the step, or the reason for none.

        Args:
            batch: The minibatch.
            part: What it trains.
            optimizer: With the groups ``actor`` and ``critic``.
            backward: Lightning's ``manual_backward``.
            dtype: Coarsest dtype of the forward pass.

        Raises:
            UpdateError: The ratio is not 1 where it must be, and ``guards.self_check`` is `error`.
        """
        parameters = {group["name"]: group["params"] for group in optimizer.param_groups}
        idle = _IDLE[part]
        untouched = parameters[idle] if idle and world_size() > 1 else ()
        terms = accumulate_gradients(
            batch.experience,
            self.objective,
            self.coefficients(),
            backward=backward,
            part=part,
            idle=untouched,
        )
        if self.text_mix is not None and part != "critic":
            terms = self.text_mix.add(terms, self.objective, batch, parameters, backward)
        if idle:
            drop_gradients(parameters[idle])
        norms = {name: gradient_norm(group) for name, group in parameters.items()}
        report = report_of(terms, norms["actor"], norms["critic"], limits=self._limits(part))
        if part != "critic" and not self.checked:
            self.checked = True
            self.self_check(all_reduce_max(terms.first_error), dtype)
        if report.decision == "step":
            for name, group in parameters.items():
                bound = self.groups[name].max_grad_norm
                clip_gradients(group, max_norm=bound, norm=norms[name])
            optimizer.step()
        optimizer.zero_grad()
        self.stopped |= report.stops
        self.num_skipped += report.stops
        return terms, report

    def coefficients(self) -> Coefficients:
        """Coefficients in force."""
        ppo, low = self.objective.ppo, self.controls["clip_range"]
        widened = ppo.clip_range_high or ppo.clip_range
        return Coefficients(
            clip_low=low,
            clip_high=low * widened / ppo.clip_range,
            ent_coef=self.controls["ent_coef"],
            kl_coef=self.controls["kl_coef"],
            penalty_coef=self.controls["penalty_coef"],
        )

    def _limits(self, part: Part) -> Limits:
        bound = self.objective.ppo.kl_limit
        old = inf if bound is None else bound
        if part == "critic" or not self.checked:
            return Limits(kl_old=old)  # the policy has not moved yet: a difference is rounding
        return Limits(
            kl_old=old,
            kl_ref=self.controls["max_kl_ref"],
            kl_ref_per_token=self.controls["max_kl_ref_per_token"],
        )

    def kl_old_after(self, batch: MiniBatch) -> float:
        """KL(old‖new) of a minibatch with the current weights, nats per token, over all ranks."""
        return kl_old_of(batch.experience, self.objective, self.coefficients())
