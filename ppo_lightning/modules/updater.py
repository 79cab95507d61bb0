"""The second half of an iteration: the optimiser steps, one for each minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ppo_lightning.configs import GroupConfig, KLConfig
from ppo_lightning.distributed import all_reduce_max, all_reduce_sum, shares_gradients
from ppo_lightning.modules.controls import Controls
from ppo_lightning.modules.decision import Limits, StepReport, report_of
from ppo_lightning.modules.guards import SelfCheck
from ppo_lightning.modules.objective import SUMS, Coefficients, Terms
from ppo_lightning.modules.optim import (
    clip_gradients,
    collect_gradients,
    drop_gradients,
    gradient_norm,
)
from ppo_lightning.modules.passes import IDLE, Part, pass_plan
from ppo_lightning.modules.text_mix import TextMix
from ppo_lightning.modules.update import Objective, Unsynced, accumulate_gradients, kl_old_of
from ppo_lightning.types import MiniBatch

Stop = Literal["kl", "given up"]


@dataclass(kw_only=True)
class Updater:
    """Takes the steps of an update, and remembers how far it got.

    Args:
        objective: Networks and loss.
        controls: Coefficients and bounds in force.
        groups: Settings of the parameter groups ``actor`` and ``critic``.
        self_check: Ratio 1 at the first minibatch.
        text_mix: Language modelling beside PPO, or None.

    Attributes:
        stop: What ended the update of this buffer: a bound on a ``kl``, or numbers that stay not
            finite (``given up``); None while it goes on.
        returning: Whether the buffer trains the actor alone, and nothing but the way back to
            within a bound on its KL to the reference.
        num_skipped: Planned steps that a bound on a KL left out, the one that met it included.
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
        self.returning = False
        self.stop: Stop | None = None
        self.num_skipped = 0
        self._checked = self._moved = False

    def planned(self, batch: MiniBatch) -> Part | None:
        """Say what a minibatch is to train; None where its pass is not due."""
        plan = self._plan()
        return plan[batch.epoch] if batch.epoch < len(plan) else None

    def part(self, batch: MiniBatch) -> Part | None:
        """Say what a minibatch trains; None where it is left out.

        A stop by a KL is the actor's: the critic's extra passes are made all the same.
        """
        part = self.planned(batch)
        if part is None or self.stop == "given up":
            return None
        plan, extra = self._plan(), self.objective.ppo.extra_critic_epochs
        if self.stop == "kl" and not (part == "critic" and batch.epoch >= len(plan) - extra):
            self.num_skipped += 1
            return None
        return part

    def _plan(self) -> tuple[Part, ...]:
        plan = pass_plan(
            self.objective.ppo,
            epochs=int(self.controls["num_update_epochs"]),
            train_actor=self.controls["train_actor"] > 0,
        )
        if self.returning:  # the critic would learn that scores count nothing
            plan = tuple("actor" for part in plan if part != "critic")
        return plan

    def step(
        self,
        batch: MiniBatch,
        part: Part,
        *,
        optimizer: Any,
        backward: Callable[[Tensor], None],
        unsynced: Unsynced = nullcontext,
        dtype: torch.dtype,
    ) -> tuple[Terms, StepReport]:
        """One forward and backward over the minibatch, then the step, or the reason for none.

        Args:
            batch: The minibatch.
            part: What it trains.
            optimizer: With the groups ``actor`` and ``critic``.
            backward: Lightning's ``manual_backward``.
            unsynced: See ``accumulate_gradients``.
            dtype: Coarsest dtype of the forward pass.

        Raises:
            UpdateError: The ratio is not 1 where it must be, and ``guards.self_check`` is `error`.
        """
        parameters = {group["name"]: group["params"] for group in optimizer.param_groups}
        terms = self._gradients(batch, part, parameters, backward, unsynced)
        collect_gradients(optimizer)
        if (idle := IDLE[part]) is not None:
            drop_gradients(parameters[idle])
        norms = {name: gradient_norm(group) for name, group in parameters.items()}
        report = report_of(
            terms, norms["actor"], norms["critic"], limits=self._limits_of_step(part)
        )
        if part != "critic" and not self._checked:
            self._checked = True
            first_error = float(all_reduce_max(terms.first_error))
            report = replace(report, first_error=first_error)
            self.self_check(first_error, _mean_error(terms), dtype)
        if report.decision == "step":
            for name, group in parameters.items():
                bound = self.groups[name].max_grad_norm
                clip_gradients(group, max_norm=bound, norm=norms[name])
            optimizer.step()
            rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
            self._moved |= part != "critic" and rates["actor"] > 0
        optimizer.zero_grad()
        if report.stops:
            self.stop = "kl"
            self.num_skipped += 1
        return terms, report

    def _gradients(
        self,
        batch: MiniBatch,
        part: Part,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        backward: Callable[[Tensor], None],
        unsynced: Unsynced,
    ) -> Terms:
        """Forward and backward; what a group that is not trained gets means nothing."""
        idle = IDLE[part]
        untouched = parameters[idle] if idle else ()
        experience, objective = batch.experience, self.objective
        if self.returning:
            # The penalty alone, in the loss: as a reward it is too noisy to find the way.
            experience = replace(experience, advantages=torch.zeros_like(experience.advantages))
            objective = replace(objective, kl=KLConfig(estimator="k2", placement="loss"))
        terms = accumulate_gradients(
            experience,
            objective,
            self.coefficients(),
            backward=backward,
            part=part,
            idle=untouched if shares_gradients(untouched) else (),
            unsynced=unsynced,
        )
        if self.text_mix is not None and part != "critic":
            terms = self.text_mix.add(terms, self.objective, batch, parameters, backward)
        return terms

    def coefficients(self) -> Coefficients:
        """Coefficients in force."""
        ppo, low = self.objective.ppo, self.controls["clip_range"]
        widened = ppo.clip_range_high or ppo.clip_range
        return Coefficients(
            clip_low=low,
            clip_high=low * widened / ppo.clip_range,
            ent_coef=self.controls["ent_coef"],
            kl_coef=1.0 if self.returning else self.controls["kl_coef"],
            penalty_coef=self.controls["penalty_coef"],
        )

    def limits(self) -> Limits:
        """Bounds in force."""
        bound = self.objective.ppo.kl_limit
        return Limits(
            kl_old=inf if bound is None else bound,
            kl_ref=self.controls["max_kl_ref"],
            kl_ref_per_token=self.controls["max_kl_ref_per_token"],
        )

    def _limits_of_step(self, part: Part) -> Limits:
        limits = self.limits()
        if part == "critic" or self.returning or not self._moved:
            # On its way back, or where it was: a difference to the reference would be rounding.
            return Limits(kl_old=limits.kl_old)
        return limits

    def kl_old_after(self, batch: MiniBatch) -> float:
        """KL(old‖new) of a minibatch with the current weights, nats per token, over all ranks."""
        return kl_old_of(batch.experience, self.objective, self.coefficients())


def _mean_error(terms: Terms) -> float:
    """Mean |log π_θ − log π_old| over the tokens of a minibatch, over all ranks."""
    own = terms.sums[[SUMS.index("log_ratio_abs"), SUMS.index("tokens")]]
    total, tokens = all_reduce_sum(own).tolist()
    return float(total / max(tokens, 1.0))
