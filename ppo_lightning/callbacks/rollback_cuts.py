"""What a rollback asks of the dials: lower rates, a higher β, for good or for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least, require_positive
from ppo_lightning.functional import further_cut
from ppo_lightning.modules import Controls, Request
from ppo_lightning.types import Verdict

SOURCE = "CheckpointRollback"


class RollbackCuts:
    """Factors on dials, multiplied by every rollback anew while the former ones hold.

    Args:
        steps: Dial to the factor of one rollback and the bound of their product.
        kl_coef_from_zero: β at the first rollback of a run without penalty; None leaves it off.
        hold_iterations: How long the changes hold; None holds them for good.
    """

    def __init__(
        self,
        steps: Mapping[str, tuple[float, float]],
        *,
        kl_coef_from_zero: float | None,
        hold_iterations: int | None,
    ) -> None:
        require_positive("kl_coef_from_zero", kl_coef_from_zero)
        require_at_least("hold_iterations", hold_iterations, 1)
        self._steps = dict(steps)
        self.kl_coef_from_zero, self.hold_iterations = kl_coef_from_zero, hold_iterations
        self.forget()

    def forget(self) -> None:
        """Begin as if there had been no rollback."""
        self.factors = dict.fromkeys(self._steps, 1.0)
        self._without_penalty = False
        self._until: int | None = None

    def apply(
        self, controls: Controls, verdict: Verdict, *, number: int
    ) -> dict[str, tuple[float, float]]:
        """Ask for lower rates and a higher β.

        Args:
            controls: The run's dials.
            verdict: Why.
            number: Of the rollback, counted from 1.

        Returns:
            Values before and after by dial.
        """
        if self._until is not None and verdict.iteration > self._until:
            self.forget()
        before = {dial: controls[dial] for dial in self._steps}
        if self.factors["kl_coef"] == 1 and before["kl_coef"] == 0:
            self._without_penalty = self.kl_coef_from_zero is not None
        if self.hold_iterations is not None:
            self._until = verdict.iteration + self.hold_iterations
        reason = f"rollback {number}, {verdict.illness}: {verdict.evidence}"
        for dial, (factor, bound) in self._steps.items():
            self.factors[dial] = further_cut(self.factors[dial], factor, bound=bound)
            controls.request(self._request(dial, reason))
        return {dial: (before[dial], controls[dial]) for dial in self._steps}

    def _request(self, dial: str, reason: str) -> Request:
        factor: float | None = self.factors[dial]
        value = None
        if dial == "kl_coef" and self._without_penalty:
            first = further_cut(1.0, self._steps[dial][0], bound=self._steps[dial][1])
            value, factor = (self.kl_coef_from_zero or 0.0) * self.factors[dial] / first, None
        return Request(
            source=SOURCE,
            dial=dial,
            value=value,
            factor=factor,
            layer="safety",
            until=self._until,
            reason=reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain containers."""
        return {
            "factors": dict(self.factors),
            "without_penalty": self._without_penalty,
            "until": self._until,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; dials that are no longer cut are left out."""
        self.forget()
        self.factors |= {k: v for k, v in state["factors"].items() if k in self.factors}
        self._without_penalty = bool(state["without_penalty"])
        self._until = state["until"]


def lowered(dial: str, factor: float | None, least: float) -> dict[str, tuple[float, float]]:
    """Factor and bound of a dial that goes down; nothing where it stays."""
    name = f"{dial.removesuffix('_factor')}_factor"
    for argument, value in ((name, factor), (f"min_{name}", least)):
        in_range = value is None or 0 < value <= 1
        require(in_range, f"`{argument}` must lie in (0, 1], got {value}.")
    return {} if factor is None else {dial: (factor, least)}


def raised(dial: str, factor: float, most: float) -> dict[str, tuple[float, float]]:
    """Factor and bound of a dial that goes up."""
    require_at_least(f"{dial}_factor", factor, 1.0)
    require_at_least(f"max_{dial}_factor", most, 1.0)
    return {dial: (factor, most)}
