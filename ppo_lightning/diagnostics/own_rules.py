"""Rules of a user's own: beside those of this project, and asked with care."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ppo_lightning.diagnostics.course import Course
from ppo_lightning.diagnostics.diagnosis import SEVERITIES, Finding
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules import RULES, Rule
from ppo_lightning.errors import ConfigError, first_line, unknown_key_message


class RuleError(ConfigError):
    """A rule that raises, or says something that is no finding.

    Args:
        message: What it did.
        illness: That the rule looks for.
    """

    def __init__(self, message: str, *, illness: str = "") -> None:  # a copy is made without it
        super().__init__(message)
        self.illness = illness


def rules_with(
    own: Iterable[Rule], ignore: Collection[str] = (), *, option: str = "`ignore`"
) -> tuple[Rule, ...]:
    """Return this project's rules and a user's own, which go last.

    One on an illness that has a rule here takes its place.

    Args:
        own: The user's.
        ignore: Illnesses that are not looked for.
        option: What named these, for the error.

    Raises:
        ConfigError: A rule has no name of an illness, two of the user's have the same, or one that
            is ignored is none.
    """
    mine: dict[str, Rule] = {}
    for rule in own:
        name = getattr(rule, "illness", None)
        kind = type(rule).__name__
        if not isinstance(name, str) or not name:
            raise ConfigError(f"`rules`: {kind} has no `illness`, the name of what it looks for.")
        if name in mine:
            other = type(mine[name]).__name__
            raise ConfigError(f"`rules`: {other} and {kind} both look for `{name}`; leave one out.")
        mine[name] = rule
    asked = (*(rule for rule in RULES if rule.illness not in mine), *mine.values())
    known = [rule.illness for rule in asked]
    for name in ignore:
        if name not in known:
            raise ConfigError(unknown_key_message(name, known, option))
    return tuple(rule for rule in asked if rule.illness not in ignore)


def ask(rule: Rule, course: Course, limits: RuleLimits) -> Finding | None:
    """Ask a rule about the last iteration.

    Raises:
        RuleError: It raises, or returns something else than None or a finding with evidence.
    """
    where = f"the rule on `{rule.illness}` ({type(rule).__name__})"
    try:
        found = rule.examine(course, limits)
        if found is None:
            return None
        words = [str(evidence) for evidence in found.evidence]
        if words and isinstance(found.evidence, tuple) and found.severity in SEVERITIES:
            return found
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        message = f"{where} failed in iteration {course.now.iteration}: {what}."
        raise RuleError(message, illness=rule.illness) from error
    raise RuleError(
        f"{where} returned {repr(found)[:80]} in iteration {course.now.iteration}; it must be None "
        f"or `found(severity, seen(...))`, with a severity of {', '.join(SEVERITIES)}.",
        illness=rule.illness,
    )
