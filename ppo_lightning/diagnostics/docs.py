"""The page on troubleshooting: ``python -m ppo_lightning.diagnostics.docs``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields

from ppo_lightning.diagnostics.examiner import CLEAR_AFTER
from ppo_lightning.diagnostics.handbook import HANDBOOK, Card, Turn
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.rules import COMPANIONS, RULES, Rule, SignRule

_INTRODUCTION = f"""\
# Troubleshooting

Made from the rules by `python -m ppo_lightning.diagnostics.docs > docs/troubleshooting.md`; change
it there.

`ppo-lightning diagnose RUN` reads a run's numbers and names its illnesses; the callback `Doctor`
does so while the run goes on, and can treat them (`policy: act`). Both use the rules on this page.
An illness is *watch* at its first sign, *ill* once it was seen in as many iterations as its rule
asks for, and *critical* where the run is being lost at this moment. It is over after {CLEAR_AFTER}
iterations without a sign; a *lasting* one stays, because all looks calm after such a jump. Where
one illness accounts for another, the other is told as its companion, and the one that leads is as
severe as the worst of them.

Change one thing at a time, and keep the untreated run to compare.
"""

_LIMITS = """\
## Limits

One table, `RuleLimits`; each can be set as `limits` of the callback, and as `--limits.NAME` of the
command. σ is the spread of the scores within a buffer at the start.

| limit | preset | what it is |
| --- | --- | --- |
"""


def troubleshooting() -> str:
    """Return the page, as Markdown."""
    sections = ["\n".join(_section(rule, HANDBOOK[rule.illness])) + "\n" for rule in RULES]
    return "\n".join([_INTRODUCTION, *sections]) + "\n" + _LIMITS + "".join(_limits())


def _section(rule: Rule, card: Card) -> Iterator[str]:
    """Yield symptom, evidence, causes and remedies of one illness."""
    sign = rule.sign.__doc__ if isinstance(rule, SignRule) else rule.__doc__
    yield from (f"## {card.title}", "", f"`{rule.illness}`. {card.signs}", "")
    lasts = f"; lasting from `{rule.lasting}` on" if rule.lasting else ""
    yield f"**The rule.** {_first_line(sign)} Seen {_times(rule.confirm)}{lasts}."
    if companions := COMPANIONS.get(rule.illness):
        yield f"Accounts for {', '.join(f'`{name}`' for name in companions)}."
    yield from ("", "**Likely causes**, the likeliest first:", "")
    yield from (f"- {cause}" for cause in card.causes)
    yield from ("", "**Try**, the first first:", "")
    yield from (f"- {remedy.text()}" for remedy in card.remedies)
    if card.turns:
        yield from ("", f"**`policy: act`** turns {'; '.join(map(_turn, card.turns))}.")
    yield from ("", f"Source: {card.source}.")


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _times(confirm: int) -> str:
    return "once" if confirm == 1 else f"in {confirm} of {confirm + 1} iterations"


def _turn(turn: Turn) -> str:
    what = f"`{turn.dial}` "
    if turn.by_spread:
        what += "by the spread of the scores"
    elif turn.factor is not None:
        what += f"× {turn.factor:g}"
        what += "" if turn.from_zero is None else f" (from 0: {turn.from_zero:g})"
    else:
        what += f"to {turn.value:g}"
    what += "" if turn.iterations is None else f" for {turn.iterations} iterations"
    return what + (f" if it is {turn.form}" if turn.form else "")


def _limits() -> Iterator[str]:
    described = dict(_described(RuleLimits.__doc__ or ""))
    for field in fields(RuleLimits):
        cell = described[field.name].replace("``", "`").replace("|", "\\|")
        yield f"| `{field.name}` | {field.default:g} | {cell} |\n"


def _described(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield names and descriptions of a docstring's arguments."""
    body = docstring.split("Args:\n", 1)[1].split("\n\n", 1)[0]
    for match in re.finditer(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", body, re.MULTILINE):
        yield match[1], re.sub(r"\s+", " ", match[2]).strip()


if __name__ == "__main__":
    sys.stdout.buffer.write(troubleshooting().encode("utf-8"))
