"""An examination as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

from ppo_lightning.diagnostics import HANDBOOK, Diagnosis, headline
from ppo_lightning.diagnostics.course import known
from ppo_lightning.metrics import IterationStats
from ppo_lightning.reporting.examination import Examination
from ppo_lightning.reporting.timeline import thinned, timeline

WIDTH = 100
_MOST_HAPPENINGS = 30
_MOST_COLUMNS = 12


def report_text(examination: Examination) -> str:
    """Return the whole report: verdict, each illness, what happened, what could not be judged."""
    parts = [
        list(_head(examination)),
        *(list(_illness(examination, d)) for d in examination.diagnoses),
        list(_happenings(examination)),
        list(limits_of_sight(examination)),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(examination: Examination) -> Iterator[str]:
    run = examination.run
    first, last = run.rows[0].iteration, run.rows[-1].iteration
    yield headline(examination.diagnoses)
    yield f"{run.path} ({run.kind}): {len(run.rows)} iteration(s), {first} to {last}"
    for note in run.notes:
        yield f"note: {note}"


def _illness(examination: Examination, diagnosis: Diagnosis) -> Iterator[str]:
    yield title_of(diagnosis)
    yield f"  {span_of(diagnosis)}"
    for evidence in diagnosis.evidence:
        yield from _wrapped(str(evidence), "  - ")
    card = HANDBOOK.get(diagnosis.illness)
    if card is None or diagnosis.companion_of is not None:
        return
    yield from _wrapped("; ".join(card.causes), "  likely: ")
    if diagnosis.severity == "watch":
        return
    for remedy in card.remedies:
        yield from _wrapped(remedy.text(row_of(examination, diagnosis)), "  try ")
    yield from _wrapped(card.source, "  source: ")


def title_of(diagnosis: Diagnosis) -> str:
    """Return severity, name, title and, of a companion, its cause."""
    card = HANDBOOK.get(diagnosis.illness)
    form = f" ({diagnosis.form})" if diagnosis.form else ""
    of = f", accounted for by {diagnosis.companion_of}" if diagnosis.companion_of else ""
    name = "" if card is None else f": {card.title}"
    return f"{diagnosis.severity.upper()} {diagnosis.illness}{name}{form}{of}"


def span_of(diagnosis: Diagnosis) -> str:
    """Say since when an illness was there, and until when."""
    seen = "" if diagnosis.until is not None else f", last seen in {diagnosis.iteration}"
    return f"{diagnosis.span}{seen}"


def row_of(examination: Examination, diagnosis: Diagnosis) -> IterationStats:
    """Return the iteration in which an illness was last seen, for the values then in force.

    Learning rates are the highest of the run: that of a warm-up or a decay is not the config's.
    """
    rows = examination.run.rows
    row = next((r for r in reversed(rows) if r.iteration <= diagnosis.iteration), rows[-1])
    return replace(
        row,
        lr_actor=max(known(r.lr_actor for r in rows), default=None),
        lr_critic=max(known(r.lr_critic for r in rows), default=None),
    )


def missing_of(examination: Examination) -> str:
    """Say in one line what was not measured, and which rules cannot speak; empty if all can."""
    blind = examination.blind
    if not blind:
        return ""
    names = dict.fromkeys(name for missing in blind.values() for name in missing)
    shown = ", ".join(f"`{name}`" for name in names)
    return f"not measured: {shown}; so nothing can be said of {', '.join(blind)}"


def _happenings(examination: Examination) -> Iterator[str]:
    found = timeline(examination)
    shown = thinned(found, _MOST_HAPPENINGS)
    if not found:
        return
    yield "timeline"
    for happening in shown:
        yield from _wrapped(happening.text, f"  {happening.iteration:>5}  ")
    if len(shown) < len(found):
        yield f"         … {len(found) - len(shown)} more: `--json` has all"


def limits_of_sight(examination: Examination) -> Iterator[str]:
    """Yield a sentence on each thing that could not be judged, or was not."""
    missing = missing_of(examination)
    if missing:
        yield missing
    if len(examination.run.rows) == 1:
        yield "there is one iteration: nothing that compares iterations could be judged"
    if examination.ignored:
        yield f"not looked for: {', '.join(examination.ignored)}"
    if examination.run.unknown:
        unknown = examination.run.unknown
        more = f" and {len(unknown) - _MOST_COLUMNS} more" if len(unknown) > _MOST_COLUMNS else ""
        yield f"columns without a meaning here: {', '.join(unknown[:_MOST_COLUMNS])}{more}"


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
