"""An examination as plain containers, for other programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppo_lightning.diagnostics import HANDBOOK, Diagnosis, headline
from ppo_lightning.io import finite
from ppo_lightning.reporting.examination import Examination, Spell
from ppo_lightning.reporting.text import row_of
from ppo_lightning.reporting.timeline import timeline

RECORD_VERSION = 1
"""Raised when a key goes, or its meaning changes; not when one is added."""


def report_record(examination: Examination) -> dict[str, Any]:
    """Return all that was found; NaN and infinities are null."""
    run = examination.run
    record: dict[str, Any] = finite(
        {
            "version": RECORD_VERSION,
            "verdict": headline(examination.diagnoses),
            "severity": examination.severity or "healthy",
            "exit_code": examination.exit_code,
            "run": {
                "path": str(run.path),
                "kind": run.kind,
                "iterations": len(run.rows),
                "first": run.rows[0].iteration,
                "last": run.rows[-1].iteration,
                "notes": list(run.notes),
                "unknown_columns": list(run.unknown),
            },
            "diagnoses": [_diagnosis(examination, d) for d in examination.diagnoses],
            "episodes": [_episode(spell) for spell in examination.spells],
            "timeline": [asdict(happening) for happening in timeline(examination)],
            "changes": [asdict(change) for change in run.changes],
            "not_judged": {name: list(needs) for name, needs in examination.blind.items()},
            "ignored": list(examination.ignored),
            "limits": asdict(examination.limits),
        }
    )
    return record


def _diagnosis(examination: Examination, diagnosis: Diagnosis) -> dict[str, Any]:
    card = HANDBOOK.get(diagnosis.illness)
    now = row_of(examination, diagnosis)
    return {
        "illness": diagnosis.illness,
        "title": None if card is None else card.title,
        "severity": diagnosis.severity,
        "since": diagnosis.since,
        "last_seen": diagnosis.iteration,
        "over_since": diagnosis.until,
        "companion_of": diagnosis.companion_of,
        "form": diagnosis.form or None,
        "evidence": [asdict(evidence) for evidence in diagnosis.evidence],
        "causes": [] if card is None else list(card.causes),
        "remedies": []
        if card is None
        else [
            {
                "key": remedy.key,
                "text": remedy.text(now),
                "now": None if remedy.field is None else getattr(now, remedy.field),
                "factor": remedy.factor,
                "value": remedy.value,
            }
            for remedy in card.remedies
        ],
    }


def _episode(spell: Spell) -> dict[str, Any]:
    episode = spell.episode
    return {
        "illness": episode.illness,
        "severity": episode.severity,
        "since": episode.since,
        "last_seen": episode.seen,
        "over_since": episode.until,
        "undone_in": spell.undone_in,
    }
