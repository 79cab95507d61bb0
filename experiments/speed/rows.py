"""A file of runs and their results, one a line, so that a script can be stopped and called anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")


@dataclass(frozen=True)
class Run:
    """One measurement of one of those that are compared.

    Args:
        who: Whose.
        size: See ``sizes.py``.
        mode: Likewise.
        round: Number of the repetition.
        threads: Of the process.
    """

    who: str
    size: str
    mode: str
    round: int
    threads: int


def known(file: Path, kind: Callable[..., R]) -> dict[R, dict[str, Any]]:
    """Read what earlier calls have left.

    Args:
        file: May be missing.
        kind: Dataclass of a run.
    """
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {kind(**row["run"]): row["result"] for row in rows}


def complete(
    file: Path, kind: Callable[..., R], planned: Iterable[R], make: Callable[[R], dict[str, Any]]
) -> dict[R, dict[str, Any]]:
    """Make the runs that are missing, each written at once, and return all.

    Args:
        file: Of the results.
        kind: Dataclass of a run.
        planned: Runs in their order.
        make: Makes one.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    results = known(file, kind)
    for run in planned:
        if run in results:
            continue
        results[run] = make(run)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"run": vars(run), "result": results[run]}) + "\n")
        print(run, flush=True)
    return results
