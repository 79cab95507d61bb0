"""Diagnoses in words."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_lightning.diagnostics.diagnosis import Diagnosis
from ppo_lightning.diagnostics.handbook import HANDBOOK
from ppo_lightning.metrics import IterationStats


def notice(diagnosis: Diagnosis, *, now: IterationStats | None = None, advise: bool = True) -> str:
    """Tell one diagnosis: a line, and below it causes and remedies.

    Args:
        diagnosis: Of an illness; of one that the handbook does not know, the line alone.
        now: The last iteration, for figures in the remedies.
        advise: Whether to say what may be behind it and what to try.
    """
    card = HANDBOOK.get(diagnosis.illness)
    lines = [str(diagnosis)]
    if card is not None and advise and diagnosis.companion_of is None:
        lines.append(f"  likely: {'; '.join(card.causes)}.")
        lines += [f"  try {remedy.text(now)}" for remedy in card.remedies]
        lines.append(f"  source: {card.source}")
    return "\n".join(lines)


def headline(diagnoses: Sequence[Diagnosis]) -> str:
    """Say in one line how a run is."""
    leading = [d for d in diagnoses if d.severity != "watch"]
    if not leading:
        watched = [d.illness for d in diagnoses if d.companion_of is None]
        return "healthy" + (f"; to watch: {', '.join(watched)}" if watched else "")
    first, *others = leading
    more = f"; also {', '.join(d.illness for d in others)}" if others else ""
    return f"{first.severity}: {first.illness} {first.span}{more}"
