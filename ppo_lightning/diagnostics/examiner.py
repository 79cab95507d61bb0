"""From what rules see in single iterations to the diagnoses of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cmp_to_key
from typing import Any

from ppo_lightning.diagnostics.course import Course, is_trained, keep
from ppo_lightning.diagnostics.diagnosis import (
    Diagnosis,
    Evidence,
    Finding,
    Severity,
    rank_of,
    worst,
)
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.own_rules import RuleError, ask
from ppo_lightning.diagnostics.rules import COMPANIONS, RULES, Rule
from ppo_lightning.metrics import IterationStats

CLEAR_AFTER = 4
"""Iterations without a sign that end an episode."""

TOGETHER = 1
"""Iterations between two illnesses that count as having come together."""


Answer = Finding | RuleError | None
"""What a rule says of an iteration, or how it failed."""

_Stage = tuple[int, Severity, tuple[Evidence, ...], str]


@dataclass
class Episode:
    """One illness from its first sign to its last.

    Args:
        illness: Its name.
        since: Iteration of the first sign.
        seen: Iteration of the last sign.
        severity: The worst that was confirmed.
        evidence: Of the worst moment, or the latest of equals.
        form: Of that moment.
        signs: Severities of the latest iterations, None where nothing was seen.
        until: Iteration in which it was found to be over; None while it lasts.
        worsened: What was there when it got worse, from its first sign on: iteration, severity,
            evidence and form.
    """

    illness: str
    since: int
    seen: int
    severity: Severity = "watch"
    evidence: tuple[Evidence, ...] = ()
    form: str = ""
    signs: list[Severity | None] = field(default_factory=list)
    until: int | None = None
    worsened: list[_Stage] = field(default_factory=list)

    @property
    def began(self) -> int:
        """Iteration in which it was confirmed as more than ``watch``, or else of the first sign."""
        return next((at for at, severity, *_ in self.worsened if severity != "watch"), self.since)


class Examiner:
    """Ask every rule about every iteration, and remember.

    An illness is ``watch`` at its first sign, and worse once the sign was there in as many
    iterations as its rule asks for (``critical`` counts at once). It is over after a few iterations
    without a sign, unless its rule says that it lasts. One that another accounts for is told as its
    companion, and as ``watch``; the one that leads is then as bad as the worst of them.

    Args:
        rules: Asked in this order, which also ranks illnesses that are equally bad.
        limits: Their thresholds.
        clear_after: Iterations without a sign that end an episode.
        on_failure: Called with the error of a rule that raises or says nonsense; the others go on.
            Without it the error is raised.
        agree: Given what each rule answered here, returns what counts: on several ranks, where
            rules of a user's own may differ, the same on all.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = RULES,
        limits: RuleLimits = RuleLimits(),  # noqa: B008 (frozen)
        *,
        clear_after: int = CLEAR_AFTER,
        on_failure: Callable[[RuleError], None] | None = None,
        agree: Callable[[list[Answer]], list[Answer]] | None = None,
    ) -> None:
        self.rules, self.limits, self.clear_after = tuple(rules), limits, clear_after
        self.on_failure, self.agree = on_failure, agree
        self.episodes: list[Episode] = []
        self._open: dict[str, Episode] = {}
        self._rows: list[IterationStats] = []
        self._trained = 0

    def examine(self, row: IterationStats) -> list[Diagnosis]:
        """Read the next iteration.

        Returns:
            What the run suffers from now, the leading illness first.

        Raises:
            RuleError: A rule failed, and there is no ``on_failure``.
        """
        self._rows = keep([*self._rows, row])
        self._trained += is_trained(row)
        course = Course(self._rows, trained=self._trained)
        answers = [self._answer(rule, course) for rule in self.rules]
        if self.agree is not None:
            answers = self.agree(answers)
        for rule, answer in zip(self.rules, answers, strict=True):
            if not isinstance(answer, RuleError):
                self._note(rule, answer, row.iteration)
            elif self.on_failure is not None:
                self.on_failure(answer)
        return self.diagnoses()

    def _answer(self, rule: Rule, course: Course) -> Answer:
        try:
            return ask(rule, course, self.limits)
        except RuleError as error:
            if self.on_failure is None:
                raise
            return error

    def level(self, name: str) -> float | None:
        """Return the level of a field of ``IterationStats`` over the last three iterations."""
        return Course(self._rows).level(name, 3) if self._rows else None

    @property
    def has_begun(self) -> bool:
        """Whether it has read an iteration."""
        return bool(self._rows)

    def diagnoses(self) -> list[Diagnosis]:
        """Return what the run suffers from now, the leading illness first."""
        return ranked(list(self._open.values()), self._order)

    def summary(self) -> list[Diagnosis]:
        """Return what the run has suffered from at any time: the worst episode of each illness."""
        gravest: dict[str, Episode] = {}
        for episode in self.episodes:
            other = gravest.get(episode.illness)
            if other is None or rank_of(episode.severity) > rank_of(other.severity):
                gravest[episode.illness] = episode
        return ranked(list(gravest.values()), self._order)

    def _order(self, illness: str) -> int:
        known = [rule.illness for rule in self.rules]
        return known.index(illness) if illness in known else len(known)

    def _note(self, rule: Rule, finding: Finding | None, iteration: int) -> None:
        episode = self._open.get(rule.illness)
        if episode is None:
            if finding is None:
                return
            episode = Episode(illness=rule.illness, since=iteration, seen=iteration)
            self.episodes.append(episode)
            self._open[rule.illness] = episode
        episode.signs.append(None if finding is None else finding.severity)
        del episode.signs[: -max(rule.confirm + 1, self.clear_after)]
        if finding is not None:
            _take_in(episode, rule, finding, iteration)
        if self._is_over(episode, rule):
            episode.until = iteration
            del self._open[rule.illness]
            self._note(rule, finding, iteration)  # a sign of ``watch`` begins another

    def _is_over(self, episode: Episode, rule: Rule) -> bool:
        """Whether there was no sign for long enough that would keep it where it is.

        A sign of ``watch`` does not keep what was worse: it begins an episode of its own.
        """
        if rule.lasting is not None and rank_of(episode.severity) >= rank_of(rule.lasting):
            return False
        slight = (None,) if episode.severity == "watch" else (None, "watch")
        recent = episode.signs[-self.clear_after :]
        return len(recent) == self.clear_after and all(sign in slight for sign in recent)

    def undo_after(self, iteration: int) -> None:
        """Forget what came after an iteration, because the run went back to it."""
        undone = [row for row in self._rows if row.iteration > iteration]
        self._rows = [row for row in self._rows if row.iteration <= iteration]
        self._trained -= sum(map(is_trained, undone))
        self.episodes = [e for e in self.episodes if e.since <= iteration]
        for episode in self.episodes:
            episode.signs = episode.signs[: -len(undone) or None]
            episode.seen = min(episode.seen, iteration)
            if episode.until is not None and episode.until > iteration:
                episode.until = None
            stages = [stage for stage in episode.worsened if stage[0] <= iteration]
            if stages and len(stages) < len(episode.worsened):
                episode.worsened = stages
                _, episode.severity, episode.evidence, episode.form = stages[-1]
        self._find_open()

    def _find_open(self) -> None:
        self._open = {e.illness: e for e in self.episodes if e.until is None}

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on in a resumed run, as plain containers."""
        return {
            "rows": [row.to_log() for row in self._rows],
            "trained": self._trained,
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; episodes of rules that are gone are left out."""
        self._rows = [IterationStats.from_log(row) for row in state["rows"]]
        self._trained = int(state["trained"])
        known = {rule.illness for rule in self.rules}
        self.episodes = [_read(e) for e in state["episodes"] if e["illness"] in known]
        self._find_open()


def _read(state: Mapping[str, Any]) -> Episode:
    """Return an episode from plain containers."""
    stages = [(i, level, _evidence(e), form) for i, level, e, form in state.get("worsened", ())]
    return Episode(**{**state, "evidence": _evidence(state["evidence"]), "worsened": stages})


def _evidence(states: Iterable[Mapping[str, Any]]) -> tuple[Evidence, ...]:
    return tuple(Evidence(**state) for state in states)


def _take_in(episode: Episode, rule: Rule, finding: Finding, iteration: int) -> None:
    """Take in a sign."""
    episode.seen = iteration
    signs = [sign for sign in episode.signs[-(rule.confirm + 1) :] if sign not in (None, "watch")]
    confirmed: Severity = "watch"
    if finding.severity == "critical" or (finding.severity == "ill" and len(signs) >= rule.confirm):
        confirmed = finding.severity
    worse = rank_of(confirmed) > rank_of(episode.severity)
    if worse:
        episode.severity = confirmed
    if worse or confirmed == episode.severity or not episode.evidence:
        episode.evidence, episode.form = finding.evidence, finding.form
    if worse or not episode.worsened:
        stage = (iteration, episode.severity, episode.evidence, episode.form)
        episode.worsened.append(stage)


def ranked(episodes: Sequence[Episode], order: Callable[[str], int]) -> list[Diagnosis]:
    """Order illnesses, the leading one first, and tell companions as such.

    A confirmed illness leads unless another that leads accounts for it, which one that was over
    before does not. Of two that account for each other the one that was confirmed first leads; of
    two that were confirmed together the one that is a cause more often. Of equally bad ones those
    that are over go last.

    Args:
        episodes: At most one of each illness.
        order: Place of an illness among the rules.
    """
    leaders = _leaders([e for e in episodes if e.severity != "watch"], order)
    causes = {episode.illness: _cause(episode, leaders) for episode in episodes}
    found = [_diagnosis(episode, causes, episodes) for episode in episodes]

    def place(d: Diagnosis) -> tuple[int, bool, int, int]:
        return -rank_of(d.severity), d.until is not None, order(d.illness), d.since

    return sorted(found, key=place)


def _cause(episode: Episode, leaders: Sequence[Episode]) -> str | None:
    """Return the leading illness that accounts for one, if there is one."""
    others = (leader for leader in leaders if leader is not episode)
    return next((other.illness for other in others if _accounts_for(other, episode)), None)


def _diagnosis(
    episode: Episode, causes: Mapping[str, str | None], episodes: Sequence[Episode]
) -> Diagnosis:
    """Say how a run stands with one illness.

    Args:
        episode: Of it.
        causes: Illness to the one that accounts for it, of all.
        episodes: All of them.
    """
    cause = causes[episode.illness]
    borne = (other.severity for other in episodes if causes[other.illness] == episode.illness)
    return Diagnosis(
        illness=episode.illness,
        severity="watch" if cause is not None else worst([episode.severity, *borne]) or "watch",
        since=episode.since,
        iteration=episode.seen,
        evidence=episode.evidence,
        companion_of=cause,
        form=episode.form,
        until=episode.until,
        alone=episode.severity,
    )


def _leaders(confirmed: Sequence[Episode], order: Callable[[str], int]) -> list[Episode]:
    """Return the illnesses that no other leading one accounts for, causes first."""

    def earlier(first: Episode, second: Episode) -> int:
        if abs(first.began - second.began) > TOGETHER:
            return first.began - second.began
        return order(first.illness) - order(second.illness)

    leaders: list[Episode] = []
    for episode in sorted(confirmed, key=cmp_to_key(earlier)):
        if not any(_accounts_for(leader, episode) for leader in leaders):
            leaders = [leader for leader in leaders if not _accounts_for(episode, leader)]
            leaders.append(episode)
    return sorted(leaders, key=lambda episode: order(episode.illness))


def _accounts_for(cause: Episode, episode: Episode) -> bool:
    if episode.illness not in COMPANIONS.get(cause.illness, ()):
        return False
    # What was over before, or was less bad and is over, does not explain what is left.
    was_there = cause.until is None or episode.since <= cause.until
    is_less = cause.until is not None and rank_of(cause.severity) < rank_of(episode.severity)
    return was_there and not is_less
