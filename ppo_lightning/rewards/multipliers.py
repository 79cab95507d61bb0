"""Lagrange multipliers of the constraints among a run's rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs import Constraint
from ppo_lightning.functional import (
    Multiplier,
    Reduce,
    adapted_multiplier,
    identity,
    masked_moments,
)
from ppo_lightning.rewards.base import RewardTerm


class Multipliers:
    """λ of each constraint. Fed with sums over all ranks, they are the same on every rank.

    Args:
        terms: Of the run; those without a constraint are none of its business.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        self.constraints: dict[str, Constraint] = {
            term.name: term.constraint for term in terms if term.constraint is not None
        }
        self._states: dict[str, Multiplier] = {}
        self.load_state_dict({})

    @property
    def values(self) -> dict[str, float]:
        """λ in force, by name."""
        return {name: state.value for name, state in self._states.items()}

    def weights(self) -> dict[str, float]:
        """Factor of score less bound in the weighted sum, by name: λ with its sign."""
        return {
            name: constraint.sign * self._states[name].value
            for name, constraint in self.constraints.items()
        }

    def adapt(
        self, costs: Mapping[str, Tensor], counted_mask: Tensor, reduce: Reduce = identity
    ) -> None:
        """Move each λ by what the iteration's mean was beyond its bound.

        Args:
            costs: What the components said of this rank's responses, by name. ``[B]`` float each.
            counted_mask: Responses that count. ``[B]`` bool.
            reduce: Adds a vector over ranks; called twice if there is any constraint.
        """
        if not self.constraints:
            return
        table = torch.stack([costs[name] for name in self.constraints])
        count, means, _ = masked_moments(table, counted_mask, reduce=reduce)
        if not count:
            return
        for (name, constraint), mean in zip(self.constraints.items(), means.tolist(), strict=True):
            self._states[name] = adapted_multiplier(
                self._states[name],
                constraint.violation(mean),
                rate=constraint.lr,
                damping=constraint.damping,
                largest=constraint.max,
            )

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return plain numbers by name."""
        return {name: state._asdict() for name, state in self._states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, within the bounds of the settings; what it lacks starts anew."""
        for name, constraint in self.constraints.items():
            start = dict.fromkeys(Multiplier._fields, constraint.initial)
            found = start | dict(state.get(name, {}))
            kept = (min(float(found[field]), constraint.max) for field in Multiplier._fields)
            self._states[name] = Multiplier(*kept)
