"""How a doctor turns dials: dose by dose, within bounds, and back again."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.diagnostics import HANDBOOK, Diagnosis, Turn
from ppo_lightning.modules import Controls, Request

KL, ENTROPY, TEMPERATURE = "kl_coef", "ent_coef", "temperature"


@dataclass(frozen=True, kw_only=True)
class TreatmentConfig:
    """How far a doctor may go.

    Args:
        max_doses: How often each illness is treated.
        wait: Iterations between two doses for one illness, so that the first can show its effect.
        undo_after: Iterations without a sign after which the latest dose for an illness is taken
            back, and after as many again the one before; twice as many after each relapse. None
            never turns back.
        max_kl_coef_factor: Most that β is multiplied by, all doses together; the reciprocal bounds
            how far it is lowered.
        min_actor_lr_factor: Least that the actor's rate is multiplied by, all doses together; the
            reciprocal of its square root bounds how far it is raised.
        min_critic_lr_factor: The same of the critic's.
        min_clip_range_factor: The same of ε.
        max_temperature_factor: Most that the sampling temperature is multiplied by, all doses
            together; the reciprocal bounds how far it is lowered.
        max_ent_coef: Largest weight of the entropy bonus.
    """

    max_doses: int = 3
    wait: int = 3
    undo_after: int | None = 20
    max_kl_coef_factor: float = 64.0
    min_actor_lr_factor: float = 0.01
    min_critic_lr_factor: float = 0.1
    min_clip_range_factor: float = 0.25
    max_temperature_factor: float = 1.25
    max_ent_coef: float = 0.4

    def __post_init__(self) -> None:
        require_at_least("max_doses", self.max_doses, 1)
        require_at_least("wait", self.wait, 1)
        require_at_least("undo_after", self.undo_after, 1)
        for name in ("max_kl_coef_factor", "max_temperature_factor"):
            require_at_least(name, getattr(self, name), 1.0)
        require_at_least("max_ent_coef", self.max_ent_coef, 0.0)
        for name in ("min_actor_lr_factor", "min_critic_lr_factor", "min_clip_range_factor"):
            value = getattr(self, name)
            require(0 < value <= 1, f"`{name}` must lie in (0, 1], got {value}.")

    def bounds(self, dial: str) -> tuple[float, float]:
        """Least and largest product of the factors on a dial."""
        if dial in (KL, TEMPERATURE):
            most: float = getattr(self, f"max_{dial}_factor")
            return 1 / most, most
        least: float = getattr(self, f"min_{dial.removesuffix('_factor')}_factor", 0.25)
        return least, least**-0.5


@dataclass
class DoseRecord:
    """What was done for one illness.

    Args:
        given: The doses that are in force, oldest first: dial to factor.
        last: Iteration in which one was given or taken back.
        is_tapering: Whether the latest of all was taken back since.
        relapses: How often the illness came back then.
        values: Dial to a value that was set by the first dose.
        scales: Dial to the spread that it was multiplied by, outside of all bounds.
    """

    given: list[dict[str, float]] = field(default_factory=list)
    last: int = -1
    is_tapering: bool = False
    relapses: int = 0
    values: dict[str, float] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    def factor(self, dial: str) -> float:
        """Product of the factors of all doses in force."""
        return math.prod(dose.get(dial, 1.0) for dose in self.given)

    def dials(self) -> set[str]:
        """Return those that are turned."""
        return {*self.values, *self.scales}.union(*self.given)

    def leave(self, dials: Collection[str]) -> set[str]:
        """Forget the latest dose's part on some dials; returns those that it had turned."""
        left = self.given[-1].keys() & {*dials}
        for dial in left:
            del self.given[-1][dial]
        return left

    def take_back(self, iteration: int) -> set[str]:
        """Take the latest dose back; returns the dials that it had turned."""
        turned = self.dials()
        self.given.pop()
        self.last, self.is_tapering = iteration, True
        if not self.given:
            self.values.clear()
            self.scales.clear()
        return turned


class Treatment:
    """Turns the dials of a run for the illnesses that a doctor has found.

    What several illnesses ask of a dial is multiplied, and bounded as a whole.

    Args:
        source: Who asks; stands in the journal.
        config: How far it may go.
    """

    def __init__(self, source: str, config: TreatmentConfig) -> None:
        self.source, self.config = source, config
        self.records: dict[str, DoseRecord] = {}

    def dose(self, controls: Controls, diagnosis: Diagnosis, *, spread: float) -> list[str]:
        """Treat an illness, if a dose is due.

        Args:
            controls: The run's dials.
            diagnosis: Of the iteration that ends.
            spread: Deviation of the scores in the buffer: the unit of a first β.

        Returns:
            What was turned, in words; empty if nothing was.
        """
        card, now = HANDBOOK.get(diagnosis.illness), diagnosis.iteration
        turns = () if card is None else [t for t in card.turns if t.form in ("", diagnosis.form)]
        record = self.records.setdefault(diagnosis.illness, DoseRecord())
        waiting = record.last >= 0 and now - record.last < self.config.wait
        if not turns or waiting or len(record.given) >= self.config.max_doses:
            return []
        before = {turn.dial: controls[turn.dial] for turn in turns}
        record.given.append({})
        for turn in turns:
            self._turn(controls, record, turn, diagnosis, spread)
        record.relapses += record.is_tapering
        record.last, record.is_tapering = now, False
        return _changes(controls, before)

    def review(self, controls: Controls, diagnoses: Sequence[Diagnosis]) -> dict[str, list[str]]:
        """Take back the latest dose for each illness that has been gone for long enough.

        Returns:
            Illness to what was turned back, in words.
        """
        if self.config.undo_after is None:
            return {}
        last_sign = {diagnosis.illness: diagnosis.iteration for diagnosis in diagnoses}
        undone = {}
        for illness, record in self.records.items():
            quiet = controls.iteration - max(last_sign.get(illness, -1), record.last)
            if record.given and quiet >= self.config.undo_after * 2**record.relapses:
                turned = sorted(record.take_back(controls.iteration))
                before = {dial: controls[dial] for dial in turned}
                for dial in turned:
                    self._ask(controls, dial, f"no sign of {illness} for {quiet} iterations")
                undone[illness] = _changes(controls, before)
        return {illness: changes for illness, changes in undone.items() if changes}

    def leave(self, controls: Controls, dials: Collection[str]) -> list[str]:
        """Take this iteration's part of the doses on some dials back: another one has turned them.

        Returns:
            What was turned back, in words.
        """
        left: set[str] = set()
        for record in self.records.values():
            if record.given and record.last == controls.iteration and not record.is_tapering:
                left |= record.leave(dials)
        before = {dial: controls[dial] for dial in sorted(left)}
        for dial in before:
            self._ask(controls, dial, "left to what else has treated the run")
        return _changes(controls, before)

    def withdraw_unknown(self, controls: Controls) -> str:
        """Take back what is asked for in this name, and stands in no record.

        Returns:
            What was turned back, in words.
        """
        known = {dial for record in self.records.values() for dial in record.dials()}
        loose = [dial for dial in controls.asked_by(self.source) if dial not in known]
        before = {dial: controls[dial] for dial in loose}
        for dial in loose:
            controls.withdraw(self.source, dial)
        return ", ".join(_changes(controls, before))

    def is_exhausted(self, diagnosis: Diagnosis) -> bool:
        """Whether the last dose was given, and has had its time."""
        record = self.records.get(diagnosis.illness, DoseRecord())
        waited = diagnosis.iteration - record.last >= self.config.wait
        return len(record.given) >= self.config.max_doses and waited

    def _turn(
        self,
        controls: Controls,
        record: DoseRecord,
        turn: Turn,
        diagnosis: Diagnosis,
        spread: float,
    ) -> None:
        dial, reason = turn.dial, f"{diagnosis.illness}: {diagnosis.evidence[0]}"
        if turn.iterations is not None and turn.value is not None:
            until = controls.iteration + turn.iterations
            controls.request(self._request(dial, reason, value=turn.value, until=until))
            return
        if turn.by_spread:
            record.scales.setdefault(dial, spread)
        elif turn.from_zero is not None and controls[dial] == 0:
            record.values[dial] = turn.from_zero * (spread if dial == KL else 1.0)
        elif turn.factor is not None:
            record.given[-1][dial] = turn.factor
        self._ask(controls, dial, reason)

    def _ask(self, controls: Controls, dial: str, reason: str) -> None:
        """Ask for what all doses together want of a dial; for nothing, take the request back."""
        factor, scale, value = 1.0, 1.0, None
        for record in self.records.values():
            factor *= record.factor(dial)
            scale *= record.scales.get(dial, 1.0)
            value = record.values.get(dial, value)
        low, high = self.config.bounds(dial)
        factor = min(max(factor, low), high) * scale
        if value is not None:
            value = (
                value * factor if dial != ENTROPY else min(value * factor, self.config.max_ent_coef)
            )
            controls.request(self._request(dial, reason, value=value))
        elif factor != 1.0:
            controls.request(self._request(dial, reason, factor=factor))
        else:
            controls.withdraw(self.source, dial)

    def _request(self, dial: str, reason: str, **what: Any) -> Request:
        return Request(source=self.source, dial=dial, layer="doctor", reason=reason, **what)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on in a resumed run, as plain containers."""
        return {illness: asdict(record) for illness, record in self.records.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.records = {illness: DoseRecord(**record) for illness, record in state.items()}


def _changes(controls: Controls, before: Mapping[str, float]) -> list[str]:
    """Say which dials are elsewhere than before."""
    return [
        f"{dial} {value:.3g} → {controls[dial]:.3g}"
        for dial, value in before.items()
        if controls[dial] != value
    ]
