"""What the steps and validations of a supervised run add up to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_lightning.distributed import all_reduce_max
from ppo_lightning.metrics import Sums
from ppo_lightning.modules.reporting import memory_gib


class StepTotals(NamedTuple):
    """Some optimiser steps, over all ranks.

    Attributes:
        sums: Totals of the steps that were taken.
        values: Fields of the record that every supervised run has.
        skipped: Steps that were not taken.
    """

    sums: Mapping[str, float]
    values: dict[str, float | None]
    skipped: float


class StepLog:
    """Adds optimiser steps up until they are asked for; the numbers are of all ranks already.

    Args:
        sums: Names that a step adds beside ``loss``, ``count`` and ``examples``.
    """

    def __init__(self, sums: Sequence[str]) -> None:
        self.names = ("loss", "count", "examples", *sums)
        self.begin()

    def begin(self) -> None:
        """Forget what was added, and start the clock."""
        self._sums = dict.fromkeys(self.names, 0.0)
        self._taken = self._skipped = 0
        self._norm = self._rate = 0.0
        self._began = time.perf_counter()

    def add(
        self,
        totals: Mapping[str, float],
        norms: Mapping[str, Tensor],
        *,
        taken: bool,
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add one step.

        Args:
            totals: By name.
            norms: Of the gradients, by group.
            taken: Whether the optimiser stepped; numbers of others are left out.
            groups: The optimiser's, for the rate in force.
        """
        self._rate = float(groups[0]["lr"])
        if not taken:
            self._skipped += 1
            return
        self._taken += 1
        self._norm += float(torch.stack([norm.float() for norm in norms.values()]).norm())
        for name in self.names:
            self._sums[name] += totals[name]

    def leave_out(self, seconds: float) -> None:
        """Do not count seconds that were spent otherwise, such as on a validation."""
        self._began += seconds

    def take(self, device: torch.device) -> StepTotals:
        """Return what was added and begin anew; to be called on all ranks."""
        steps = self._taken + self._skipped
        seconds = max(time.perf_counter() - self._began, 1e-9)
        memory = all_reduce_max(torch.tensor(memory_gib(device), device=device))
        sums = self._sums | {"seconds": seconds}
        values: dict[str, float | None] = {
            "loss": sums["loss"] / sums["count"] if sums["count"] else None,
            "learning_rate": self._rate,
            "grad_norm": self._norm / self._taken if self._taken else None,
            "examples": sums["examples"],
            "step_seconds": seconds / max(steps, 1),
            "examples_per_second": sums["examples"] / seconds,
            "memory_gib": float(memory),
        }
        found = StepTotals(sums, values, float(self._skipped))
        self.begin()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what was added, as plain numbers."""
        return {
            "sums": dict(self._sums),
            "taken": self._taken,
            "skipped": self._skipped,
            "norm": self._norm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; the clock starts anew."""
        self.begin()
        self._sums |= state["sums"]
        self._taken, self._skipped = int(state["taken"]), int(state["skipped"])
        self._norm = float(state["norm"])


class HeldOutLog:
    """Adds up this rank's held-out examples, and brings the ranks together once.

    Args:
        sums: As in ``StepLog``.
    """

    def __init__(self, sums: Sequence[str]) -> None:
        self._totals = Sums(("loss", "count", "examples", *sums))
        self._began = time.perf_counter()

    def begin(self, device: torch.device) -> None:
        """Forget what was added, and start the clock."""
        self._totals.to(device).reset()
        self._began = time.perf_counter()

    def add(self, **values: Tensor | float) -> None:
        """Add totals of some examples."""
        self._totals.add(
            **{k: v.detach() if isinstance(v, Tensor) else v for k, v in values.items()}
        )

    def totals(self) -> dict[str, float]:
        """Return the totals over all ranks."""
        return self._totals.compute()

    def seconds(self, device: torch.device) -> float:
        """Return the seconds since the start, of the slowest rank."""
        own = torch.tensor(time.perf_counter() - self._began, device=device)
        return float(all_reduce_max(own))
