"""Find a run's illnesses while it goes on, say so, and treat them if that is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from ppo_lightning.callbacks.controller import fresh_stats
from ppo_lightning.callbacks.treatment import Treatment, TreatmentConfig
from ppo_lightning.configs.checks import require
from ppo_lightning.diagnostics import (
    Answer,
    Diagnosis,
    Examiner,
    Rule,
    RuleError,
    RuleLimits,
    Severity,
    notice,
    rank_of,
    rules_with,
)
from ppo_lightning.distributed import gather_from_ranks
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.reporting import log_iteration
from ppo_lightning.types import Verdict

SOURCE = "Doctor"

Policy = Literal["observe", "advise", "act"]
_POLICIES = ("observe", "advise", "act")


class Doctor(pl.Callback):
    """Ask the rules about every iteration, and tell what they find.

    An illness is told once when it is suspected, when it gets worse and when it is over: in the
    log, in the journal (``changes`` in ``metrics.jsonl``), and as ``doctor/<illness>`` in the
    loggers, where 1 is ``watch``, 2 ``ill``, 3 ``critical``. ``docs/troubleshooting.md`` has the
    rules with their remedies.

    - ``observe`` tells the illness and its evidence.
    - ``advise`` adds likely causes and what to try, with values.
    - ``act`` turns dials as well, within ``treatment``'s bounds: rates, β, ε, the entropy bonus,
      update epochs, a pause of the actor while the critic learns. All of it is in the journal, and
      is taken back dose by dose, each after ``treatment.undo_after`` iterations without a sign.
      In an iteration in which ``CheckpointRollback`` goes back, rates that it cuts are left to it.
      ``stop_on`` names illnesses that end the run when they are ``critical``, or still there after
      the last dose.

    The command line brings one to every run that has none.

    Illnesses of severity ``report`` are also reported to the run, and ``CheckpointRollback`` goes
    back on them, once for each episode.

    Args:
        policy: What to do about illnesses.
        rules: Rules of your own, besides those of this project; one on an illness that has a rule
            takes its place. One that fails is told of once, and stops nothing. On several ranks all
            are asked, and what they say on the first one counts.
        limits: Thresholds of the rules.
        ignore: Illnesses that are not looked for.
        report: Least severity that is reported, or ``none``.
        treatment: How far ``act`` goes.
        stop_on: Illnesses that stop the run under ``act``.
    """

    def __init__(
        self,
        *,
        policy: Policy = "advise",
        rules: list[Rule] | None = None,
        limits: RuleLimits = RuleLimits(),  # noqa: B008 (frozen)
        ignore: list[str] | None = None,
        report: Literal["ill", "critical", "none"] = "critical",
        treatment: TreatmentConfig = TreatmentConfig(),  # noqa: B008 (frozen)
        stop_on: list[str] | None = None,
    ) -> None:
        require(policy in _POLICIES, f"`policy` must be one of {_POLICIES}, got {policy!r}.")
        levels = ("ill", "critical", "none")
        require(report in levels, f"`report` must be one of {levels}, got {report!r}.")
        asked = rules_with(rules or (), ignore or ())
        known = sorted(rule.illness for rule in asked)
        for name in stop_on or ():
            require(name in known, f"`stop_on`: `{name}` is not looked for. Known: {known}.")
        self.policy, self.report, self.stop_on = policy, report, frozenset(stop_on or ())
        self.examiner = Examiner(asked, limits, on_failure=self._warn, agree=self._agreed)
        self.treatment = Treatment(SOURCE, treatment)
        self._told: dict[str, Severity] = {}
        self._reported: set[tuple[str, int]] = set()
        self._warned: set[str] = set()

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """What the run suffers from now, the leading illness first."""
        return self.examiner.diagnoses()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Take back what the doctor of the run that is resumed has turned, if this one only looks.

        Nobody would turn it back otherwise. One that acts takes back what it has no record of.
        """
        if _is_supervised(pl_module):
            return
        if self.policy != "act":
            self.treatment.records.clear()
        if undone := self.treatment.withdraw_unknown(pl_module.controls):
            rank_zero_info(f"{SOURCE} takes back what an earlier one has turned: {undone}.")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        stats = None if _is_supervised(pl_module) else fresh_stats(pl_module)
        if stats is None:
            return
        found = self.examiner.examine(stats)
        for diagnosis in found:
            self._report(pl_module, diagnosis, stats)
        self._tell(pl_module, found, stats)
        if self.policy == "act":
            self._act(trainer, pl_module, found, stats)

    def on_iteration_end(self, trainer: pl.Trainer, module: Any, stats: IterationStats) -> None:
        """Log severities, and forget what a rollback has undone; called by the module."""
        gone = {f"doctor/{episode.illness}": 0.0 for episode in self.examiner.episodes}
        severities = {f"doctor/{d.illness}": rank_of(d.severity) + 1.0 for d in self.diagnoses}
        worst = max(severities.values(), default=0.0)
        told = {"doctor/severity": worst, **gone, **severities}
        log_iteration(trainer, told, iteration=stats.iteration)
        restored, lowered = _went_back(module, stats.iteration)
        if restored is not None:
            # Rates that are cut twice in one iteration are far too low; twice the pull is no harm.
            if undone := self.treatment.leave(module.controls, lowered):
                rank_zero_info(f"{SOURCE} leaves it to the rollback: {', '.join(undone)}.")
            self.examiner.undo_after(restored)
            self._told = {d.illness: d.severity for d in self.diagnoses}
            # What comes again after it is reported again, even if it had been watched before.
            self._reported &= {_key(d) for d in self.diagnoses if d.severity != "watch"}

    # ------------------------------------------------------------------ what it does

    def _report(self, module: Any, diagnosis: Diagnosis, stats: IterationStats) -> None:
        """Report an illness to those who treat it, once for each episode."""
        key = _key(diagnosis)
        if self.report == "none" or key in self._reported or diagnosis.companion_of is not None:
            return
        if diagnosis.iteration != stats.iteration:
            return
        if rank_of(diagnosis.severity) < rank_of(self.report):
            return
        self._reported.add(key)
        evidence = "; ".join(map(str, diagnosis.evidence)) + "."
        verdict = Verdict(
            illness=diagnosis.illness, evidence=evidence, iteration=stats.iteration, source=SOURCE
        )
        module.report(verdict)

    def _tell(self, module: Any, found: list[Diagnosis], stats: IterationStats) -> None:
        """Say what is new, in the log and in the journal."""
        for diagnosis in found:
            before = self._told.get(diagnosis.illness)
            if before is not None and rank_of(diagnosis.severity) <= rank_of(before):
                continue
            self._told[diagnosis.illness] = diagnosis.severity
            _note(module, diagnosis.illness, before, diagnosis.severity, str(diagnosis))
            if diagnosis.severity != "watch":
                advise = self.policy != "observe"
                now = _with_rates(module, stats)
                rank_zero_info(f"{SOURCE}: {notice(diagnosis, now=now, advise=advise)}")
        for illness in self._told.keys() - {diagnosis.illness for diagnosis in found}:
            before = self._told.pop(illness)
            _note(module, illness, before, None, "no sign of it any more")
            if before != "watch":
                rank_zero_info(f"{SOURCE}: {illness} is over in iteration {stats.iteration}.")

    def _agreed(self, answers: list[Answer]) -> list[Answer]:
        """Take what the rules say on the first rank: dials of one rank alone would part the others.

        Failures on other ranks are told of.
        """
        first, *others = gather_from_ranks([answers])
        for answer in itertools.chain(*others):
            if isinstance(answer, RuleError):
                self._warn(answer)
        return first

    def _warn(self, error: RuleError) -> None:
        """Say once of each rule that it fails; the run and the other rules go on."""
        if error.illness not in self._warned:
            self._warned.add(error.illness)
            rank_zero_warn(f"{SOURCE}: {error} It is asked again, and not told of again.")

    def _act(
        self, trainer: pl.Trainer, module: Any, found: list[Diagnosis], stats: IterationStats
    ) -> None:
        for diagnosis in found:
            if diagnosis.iteration != stats.iteration:
                continue
            if self._should_stop(diagnosis):
                reason = f"{SOURCE} stops the run: {diagnosis}"
                module.controls.note(SOURCE, "stop", reason=reason)
                rank_zero_info(reason)
                trainer.should_stop = True
                return
            if diagnosis.severity == "watch":
                continue
            spread = self.examiner.level("score_std") or 1.0  # a median: neither NaN nor an outlier
            done = self.treatment.dose(module.controls, diagnosis, spread=spread)
            if done:
                rank_zero_info(f"{SOURCE} treats {diagnosis.illness}: {', '.join(done)}.")
        for illness, undone in self.treatment.review(module.controls, found).items():
            rank_zero_info(f"{SOURCE} takes a dose for {illness} back: {', '.join(undone)}.")

    def _should_stop(self, diagnosis: Diagnosis) -> bool:
        if diagnosis.illness not in self.stop_on:
            return False
        if "critical" in (diagnosis.severity, diagnosis.alone):  # alone: another leads
            return True
        return diagnosis.severity != "watch" and self.treatment.is_exhausted(diagnosis)

    # ------------------------------------------------------------------ checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.examiner.has_begun:
            return {}  # Lightning asks for the callbacks that a checkpoint has a state of
        return {
            "examiner": self.examiner.state_dict(),
            "treatment": self.treatment.state_dict(),
            "told": dict(self._told),
            "reported": [list(key) for key in sorted(self._reported)],
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.examiner.load_state_dict(state_dict["examiner"])
        self.treatment.load_state_dict(state_dict["treatment"])
        known = {rule.illness for rule in self.examiner.rules}
        self._told = {name: level for name, level in state_dict["told"].items() if name in known}
        self._reported = {(illness, int(since)) for illness, since in state_dict["reported"]}


def _key(diagnosis: Diagnosis) -> tuple[str, int]:
    """What no other episode has."""
    return diagnosis.illness, diagnosis.since


def _is_supervised(module: Any) -> bool:
    """Whether a module has no rollouts, and so none of the illnesses; the doctor looks on."""
    return not hasattr(module, "controls")


def _with_rates(module: Any, stats: IterationStats) -> IterationStats:
    """Put the config's learning rates in, for advice: those of a warm-up say nothing of them."""
    return replace(stats, lr_actor=module.actor.lr, lr_critic=module.critic.lr)


def _note(
    module: Any, illness: str, before: Severity | None, after: Severity | None, reason: str
) -> None:
    """Write a change of severity into the run's journal."""
    levels = [None if level is None else rank_of(level) + 1.0 for level in (before, after)]
    module.controls.note(
        SOURCE, f"illness {illness}", before=levels[0] or 0.0, after=levels[1] or 0.0, reason=reason
    )


def _went_back(module: Any, iteration: int) -> tuple[int | None, set[str]]:
    """Return the iteration that a rollback went back to in this one, and the dials it lowered."""
    lowered: dict[str, set[str]] = {}
    for entry in reversed(module.controls.journal):
        if entry["iteration"] != iteration:
            break
        if entry["dial"] == "state" and entry["after"] is not None:
            return int(entry["after"]), lowered.get(entry["source"], set())
        if None not in (entry["before"], entry["after"]) and entry["after"] < entry["before"]:
            lowered.setdefault(entry["source"], set()).add(entry["dial"])
    return None, set()
