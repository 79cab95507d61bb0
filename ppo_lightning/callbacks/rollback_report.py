"""What is kept of a stretch of a run that was undone: why, what was done, metrics and texts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from ppo_lightning.distributed import rank
from ppo_lightning.io import as_jsonl, write_text_atomic
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules import Collected
from ppo_lightning.types import Verdict


@dataclass(frozen=True, kw_only=True)
class RollbackReport:
    """One rollback.

    Args:
        number: Counted from 1.
        verdicts: Why.
        restored: Iteration after which the restored state was taken; −1 is before the first.
        stretch: What was measured in the iterations since.
        changes: Dial to its values before and after.
        notes: Lines to add, such as on snapshots that could not be read.
        stopped: Whether the run was stopped, as it had been rolled back too often.
        texts: Worst and best responses of the latest iterations.
    """

    number: int
    verdicts: Sequence[Verdict]
    restored: int
    stretch: Sequence[IterationStats]
    changes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    stopped: bool = False
    texts: Sequence[Mapping[str, Any]] = ()

    def headline(self) -> str:
        """Say in one line what happened."""
        ills = ", ".join(dict.fromkeys(verdict.illness for verdict in self.verdicts))
        what = "the run stops there" if self.stopped else f"rollback {self.number}"
        at = self.verdicts[-1].iteration
        return f"{ills} in iteration {at}: back to {self._state()}; {what}."

    def text(self) -> str:
        """Return the report as Markdown."""
        lines = [f"# Rollback {self.number}", "", self.headline(), "", "## Why", ""]
        lines += [f"- `{v.illness}` ({v.source}): {v.evidence}" for v in self.verdicts]
        lines += ["", "## What was done", ""]
        lines += [
            f"- Weights, optimiser, schedules and normalisers are those of {self._state()}.",
            "- Prompts and random numbers go on: the iterations are not repeated.",
        ]
        lines += [f"- `{d}`: {old:.4g} → {new:.4g}" for d, (old, new) in self.changes.items()]
        lines += [f"- {note}" for note in self.notes]
        if self.stopped:
            lines.append("- The run was stopped: it fell ill more often than `max_rollbacks`.")
        iterations = [str(stats.iteration) for stats in self.stretch]
        lines += [
            *("", "## What is kept", ""),
            f"- `metrics.jsonl`: iterations {', '.join(iterations)}, which were undone.",
            f"- `texts.jsonl`: {len(self.texts)} of their responses, the worst and the best.",
        ]
        return "\n".join(lines) + "\n"

    def publish(self, folder: Path | None) -> None:
        """Print it, and write it below ``folder`` if there is one; the first rank alone."""
        rank_zero_info(self.text() if self.stopped else self.headline())
        for note in self.notes:
            rank_zero_info(note)
        if folder is None or rank() != 0:
            return
        try:
            self.write(folder / str(self.number))
        except OSError as error:
            name = folder / str(self.number)
            warnings.warn(f"`{name}` could not be written: {error}.", stacklevel=2)

    def write(self, folder: Path) -> None:
        """Write ``report.md``, ``metrics.jsonl`` and ``texts.jsonl``, each wholly or not at all."""
        write_text_atomic(folder / "metrics.jsonl", as_jsonl(s.to_log() for s in self.stretch))
        write_text_atomic(folder / "texts.jsonl", as_jsonl(self.texts))
        write_text_atomic(folder / "report.md", self.text())  # last: with it the folder is whole

    def _state(self) -> str:
        if self.restored < 0:
            return "the start of the run"
        return f"the state after iteration {self.restored}"


def extremes(collected: Collected, iteration: int, number: int) -> list[dict[str, Any]]:
    """Return the worst and the best responses of this rank's buffer as plain rows.

    Args:
        collected: The buffer.
        iteration: Stands in every row.
        number: Responses of each kind.
    """
    raw = collected.result.raw.tolist()
    # A score that is not a number comes first: it is the worst there is.
    order = sorted(range(len(raw)), key=lambda i: (raw[i] == raw[i], raw[i]))
    picked = order if len(order) <= 2 * number else order[:number] + order[len(order) - number :]
    texts = collected.completions
    return [
        {
            "iteration": iteration,
            "prompt": texts.prompts[i],
            "response": texts.responses[i],
            "score": raw[i],
        }
        for i in picked
    ]
