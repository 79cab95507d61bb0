"""Whether an optimiser step is taken: decided on what all ranks measured together."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from ppo_lightning.distributed import all_reduce_sum, sum_over_ranks
from ppo_lightning.modules.objective import SUMS, Terms

Decision = Literal["step", "kl_stop", "kl_cap", "nonfinite", "empty"]

_ADDED = ("kl_old", "kl_ref", "kl_ref_before", "tokens", "sequences", "value_tokens")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Distances at which an update stops.

    Args:
        kl_old: KL(old‖new), nats per token.
        kl_ref: KL to the reference, nats per response.
        kl_ref_per_token: The same in nats per token.
    """

    kl_old: float = inf
    kl_ref: float = inf
    kl_ref_per_token: float = inf

    def beyond_reference(self, kl: float, *, responses: float, tokens: float) -> bool:
        """Whether a KL to the reference, summed over responses, is beyond one of the bounds."""
        return kl > self.kl_ref * responses or kl > self.kl_ref_per_token * tokens


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What all ranks agree on before a step.

    Args:
        decision: Take the step; stop the update, as the policy has gone too far from the old one
            (``kl_stop``) or from the reference (``kl_cap``); or skip the step, as a number is not
            finite or no token is valid (momentum would move the weights without a gradient).
        kl_old: KL(old‖new) of the minibatch over all ranks, nats per token.
        actor_norm: Gradient norm of the actor before clipping.
        critic_norm: Gradient norm of the critic before clipping.
        first_error: max |log π_θ − log π_old| over all ranks, where the policy is still the one
            that sampled; None at later steps.
    """

    decision: Decision
    kl_old: float
    actor_norm: float
    critic_norm: float
    first_error: float | None = None

    @property
    def stops(self) -> bool:
        """Whether the update goes no further."""
        return self.decision in ("kl_stop", "kl_cap")


def report_of(
    terms: Terms, actor_norm: Tensor, critic_norm: Tensor, *, limits: Limits
) -> StepReport:
    """Decide on numbers summed over all ranks; one synchronisation with the device.

    A loss or gradient that is not finite comes before the KL: its KL means nothing.

    Args:
        terms: This rank's sums.
        actor_norm: Gradient norm of the actor. 0-d.
        critic_norm: Gradient norm of the critic. 0-d.
        limits: Where the update stops.
    """
    bad = (~(terms.loss.isfinite() & terms.sums.isfinite().all())).double()
    bad = bad + (~actor_norm.isfinite()).double() + (~critic_norm.isfinite()).double()
    added = [terms.sums[SUMS.index(name)] for name in _ADDED]
    # Of all ranks, also of those that hold a model between them.
    agreed = torch.cat([all_reduce_sum(torch.stack(added)), sum_over_ranks(bad)[None]])
    norms = torch.stack([actor_norm.to(agreed), critic_norm.to(agreed)])
    *totals, num_bad, actor, critic = torch.cat([agreed, norms]).tolist()
    total = dict(zip(_ADDED, totals, strict=True))
    decision: Decision = "step"
    if num_bad > 0:
        decision = "nonfinite"
    elif total["tokens"] + total["value_tokens"] == 0:
        decision = "empty"
    elif total["kl_old"] > limits.kl_old * total["tokens"]:
        decision = "kl_stop"
    elif _beyond_cap(total, limits):
        decision = "kl_cap"
    kl_old = total["kl_old"] / (total["tokens"] or 1.0)
    return StepReport(decision=decision, kl_old=kl_old, actor_norm=actor, critic_norm=critic)


def _beyond_cap(total: dict[str, float], limits: Limits) -> bool:
    """Whether the policy is too far from the reference, and this update took it there.

    One that is on its way back goes on: a policy beyond the bound could not return otherwise.
    """
    moved_away = total["kl_ref"] > total["kl_ref_before"]
    return moved_away and limits.beyond_reference(
        total["kl_ref"], responses=total["sequences"], tokens=total["tokens"]
    )
