"""How a doctor turns dials: dose by dose, within bounds, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.diagnostics import HANDBOOK, Diagnosis, Turn
from ppo_lightning.modules import Controls, Request

KL, ENTROPY = "kl_coef", "ent_coef"


@dataclass(frozen=True, kw_only=True)
class TreatmentConfig:
    """How far a doctor may go.

    Args:
        max_doses: How often each illness is treated.
        wait: Iterations between two doses for one illness, so that the first can show its effect.
        undo_after: Iterations without a sign after which what was turned for an illness is turned
            back; twice as many after each relapse. None never turns back.
        max_kl_coef_factor: Most that β is multiplied by, all doses together; the reciprocal bounds
            how far it is lowered.
        min_actor_lr_factor: Least that the actor's rate is multiplied by, all doses together; the
            reciprocal of its square root bounds how far it is raised.
        min_critic_lr_factor: The same of the critic's.
        min_clip_range_factor: The same of ε.
        max_ent_coef: Largest weight of the entropy bonus.
    """

    max_doses: int = 3
    wait: int = 3
    undo_after: int | None = 20
    max_kl_coef_factor: float = 32.0
    min_actor_lr_factor: float = 0.01
    min_critic_lr_factor: float = 0.1
    min_clip_range_factor: float = 0.25
    max_ent_coef: float = 0.4

    def __post_init__(self) -> None:
        require_at_least("max_doses", self.max_doses, 1)
        require_at_least("wait", self.wait, 1)
        require_at_least("undo_after", self.undo_after, 1)
        require_at_least("max_kl_coef_factor", self.max_kl_coef_factor, 1.0)
        require_at_least("max_ent_coef", self.max_ent_coef, 0.0)
        for name in ("min_actor_lr_factor", "min_critic_lr_factor", "min_clip_range_factor"):
            value = getattr(self, name)
            require(0 < value <= 1, f"`{name}` must lie in (0, 1], got {value}.")

    def bounds(self, dial: str) -> tuple[float, float]:
        """Least and largest product of the factors on a dial."""
        if dial == KL:
            return 1 / self.max_kl_coef_factor, self.max_kl_coef_factor
        least: float = getattr(self, f"min_{dial.removesuffix('_factor')}_factor", 0.25)
        return least, least**-0.5


@dataclass
class DoseRecord:
    """What was done for one illness.

    Args:
        doses: How often it was treated in this episode.
        last: Iteration of the latest dose.
        relapses: How often it came back after all was turned back.
        factors: Dial to the product of the factors of all doses.
        values: Dial to a value that was set.
        scales: Dial to the spread that it was multiplied by, outside of all bounds.
    """

    doses: int = 0
    last: int = -1
    relapses: int = 0
    factors: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)


class Treatment:
    """Turns the dials of a run for the illnesses that a doctor has found.

    What several illnesses ask of a dial is multiplied, and bounded as a whole.

    Args:
        source: Who asks; stands in the journal.
        config: How far it may go.
    """

    def __init__(self, source: str, config: TreatmentConfig) -> None:
        self.source, self.config = source, config
        self.courses: dict[str, DoseRecord] = {}

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
        course = self.courses.setdefault(diagnosis.illness, DoseRecord())
        waiting = course.doses > 0 and now - course.last < self.config.wait
        if not turns or waiting or course.doses >= self.config.max_doses:
            return []
        before = {turn.dial: controls[turn.dial] for turn in turns}
        for turn in turns:
            self._turn(controls, course, turn, diagnosis, spread)
        course.doses, course.last = course.doses + 1, now
        after = {dial: controls[dial] for dial in before}
        return [
            f"{dial} {before[dial]:.3g} → {after[dial]:.3g}"
            for dial in before
            if after[dial] != before[dial]
        ]

    def review(self, controls: Controls, diagnoses: Sequence[Diagnosis]) -> list[str]:
        """Turn back what was turned for illnesses that have been gone for long enough.

        Returns:
            The illnesses whose treatment has ended.
        """
        if self.config.undo_after is None:
            return []
        last_sign = {diagnosis.illness: diagnosis.iteration for diagnosis in diagnoses}
        ended = []
        for illness, course in self.courses.items():
            quiet = controls.iteration - max(last_sign.get(illness, -1), course.last)
            if course.doses and quiet >= self.config.undo_after * 2**course.relapses:
                self.courses[illness] = DoseRecord(relapses=course.relapses + 1)
                for dial in {*course.factors, *course.values, *course.scales}:
                    self._ask(controls, dial, f"{illness} has been gone for {quiet} iterations")
                ended.append(illness)
        return ended

    def is_exhausted(self, diagnosis: Diagnosis) -> bool:
        """Whether the last dose was given, and has had its time."""
        course = self.courses.get(diagnosis.illness, DoseRecord())
        waited = diagnosis.iteration - course.last >= self.config.wait
        return course.doses >= self.config.max_doses and waited

    def _turn(
        self,
        controls: Controls,
        course: DoseRecord,
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
            course.scales.setdefault(dial, spread)
        elif turn.from_zero is not None and controls[dial] == 0:
            course.values[dial] = turn.from_zero * (spread if dial == KL else 1.0)
        elif turn.factor is not None:
            course.factors[dial] = course.factors.get(dial, 1.0) * turn.factor
        self._ask(controls, dial, reason)

    def _ask(self, controls: Controls, dial: str, reason: str) -> None:
        """Ask for what all courses together want of a dial; for nothing, take the request back."""
        factor, scale, value = 1.0, 1.0, None
        for course in self.courses.values():
            factor *= course.factors.get(dial, 1.0)
            scale *= course.scales.get(dial, 1.0)
            value = course.values.get(dial, value)
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
        return {illness: asdict(course) for illness, course in self.courses.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self.courses = {illness: DoseRecord(**course) for illness, course in state.items()}
