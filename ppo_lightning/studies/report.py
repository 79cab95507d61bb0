"""A comparison as text, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_lightning.io import finite
from ppo_lightning.studies.compare import Comparison, Measured, Row
from ppo_lightning.studies.intervals import Mean

_NONE = "–"


def headers(comparison: Comparison) -> list[str]:
    """Return the heads of the table's columns."""
    return [
        "arm",
        comparison.metric,
        "95 % interval",
        "seeds",
        "difference to base",
        "95 % interval",
        "KL, nats",
        "diagnosis",
        "time, s",
    ]


def cells(row: Row) -> list[str]:
    """Return an arm's row of the table."""
    found = 0 if row.metric is None else row.metric.num
    return [
        row.arm.label,
        number(None if row.metric is None else row.metric.mean),
        interval(row.metric),
        str(found) if found == len(row.runs) else f"{found} of {len(row.runs)}",
        number(None if row.difference is None else row.difference.mean, signed=True),
        interval(row.difference, signed=True),
        number(row.kl),
        row.health or _NONE,
        _NONE if row.seconds is None else f"{row.seconds:.0f}",
    ]


def number(value: float | None, *, signed: bool = False) -> str:
    """Write a number with four digits that count; a dash for none."""
    if value is None:
        return _NONE
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def interval(mean: Mean | None, *, signed: bool = False) -> str:
    """Write an interval; a dash where there is none."""
    if mean is None or mean.low is None or mean.high is None:
        return _NONE
    return f"{number(mean.low, signed=signed)} to {number(mean.high, signed=signed)}"


def as_text(comparison: Comparison) -> str:
    """Return the table with what belongs to it: Markdown whose columns line up as plain text."""
    table = [headers(comparison), *(cells(row) for row in comparison.rows)]
    table = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    lines = [_line(line, widths) for line in table]
    problems = [f"- {row.arm.label}, {line}" for row in comparison.rows for line in row.problems]
    if problems:
        lines += ["", "Runs that are missing:", "", *problems]
    return "\n".join([*lines, "", *(note for note in comparison.notes)])


def as_markdown(title: str, comparison: Comparison) -> str:
    """Return a page with the table."""
    return f"# {title}\n\n{as_text(comparison)}\n"


def as_json(comparison: Comparison, definition: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything in the comparison, curves too; what is not finite is null.

    Args:
        comparison: Of the arms.
        definition: What the sweep was started with; its config is left out.
    """
    found = {
        "metric": comparison.metric,
        "last": comparison.last,
        "definition": {key: value for key, value in definition.items() if key != "config"},
        "arms": [_arm(row) for row in comparison.rows],
        "notes": comparison.notes,
    }
    told: dict[str, Any] = finite(found)
    return told


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if place in (0, 7) else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def _arm(row: Row) -> dict[str, Any]:
    return {
        "name": row.arm.name,
        "label": row.arm.label,
        "settings": dict(row.arm.settings),
        "metric": _mean(row.metric),
        "difference_to_base": _mean(row.difference),
        "kl_ref": row.kl,
        "seconds": row.seconds,
        "diagnosis": row.health,
        "runs": [_run(run) for run in row.runs],
    }


def _mean(mean: Mean | None) -> dict[str, Any] | None:
    if mean is None:
        return None
    return {"mean": mean.mean, "num": mean.num, "low": mean.low, "high": mean.high}


def _run(run: Measured) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "status": run.state.status,
        "attempts": run.state.attempts,
        "seconds": run.state.seconds,
        "metric": run.level,
        "kl_ref": run.kl,
        "diagnosis": run.health,
        "problem": run.problem,
        "curve": [list(point) for point in run.curve],
    }
