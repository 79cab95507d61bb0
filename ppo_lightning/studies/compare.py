"""The arms of a sweep beside each other: means over seeds, differences to the config itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ppo_lightning.diagnostics import Examiner, headline, rank_of
from ppo_lightning.errors import DataError, nearest
from ppo_lightning.metrics import IterationStats, read_metrics
from ppo_lightning.studies.arms import Arm
from ppo_lightning.studies.intervals import Mean, mean_of
from ppo_lightning.studies.runs import Run, State

METRICS_FILE = "metrics.jsonl"
HEALTHY = -1
"""Rank of a run that nothing was confirmed in, below that of every severity."""

_MANY = 5  # arms, from which on chance is worth a word
_CHANCE = "Of arms without any effect, chance tells one in twenty apart."

Point = tuple[int, float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run has left.

    Args:
        seed: Of the run.
        state: What has become of it.
        curve: Iteration and value of the metric, where it was measured.
        level: Mean of the metric over the last iterations in which it was measured.
        kl: Mean KL to the reference over the last iterations, nats per response.
        health: What its diagnosis is, in one line.
        severity: Rank of the worst diagnosis; ``HEALTHY`` without one.
        problem: Why there is no level, or no run; empty where all is well.
    """

    seed: int
    state: State
    curve: tuple[Point, ...] = ()
    level: float | None = None
    kl: float | None = None
    health: str = ""
    severity: int = HEALTHY
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm in the comparison.

    Args:
        arm: Its settings.
        runs: One for each seed.
        metric: Mean over the seeds that have a level; None if none has.
        difference: Mean of (this arm - base) over the seeds that both have; None for the base.
        kl: Mean KL at the end.
        seconds: Of a finished run, in the mean.
        health: The worst diagnosis of its runs.
    """

    arm: Arm
    runs: tuple[Measured, ...]
    metric: Mean | None
    difference: Mean | None
    kl: float | None
    seconds: float | None
    health: str

    @property
    def problems(self) -> list[str]:
        """A line for each run that is missing in the means."""
        return [f"seed {run.seed}: {run.problem}" for run in self.runs if run.problem]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A sweep's result.

    Args:
        metric: Name of what is compared.
        last: Iterations at the end of a run that are averaged.
        rows: The base first.
        notes: What a reader should know besides.
    """

    metric: str
    last: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def measure(run: Run, state: State, metric: str, last: int) -> Measured:
    """Read what a run has left.

    Args:
        run: Finished or not; only a finished one has a level.
        state: What has become of it.
        metric: Logged name.
        last: Iterations at its end that are averaged.
    """
    found: list[IterationStats] = []
    problem = _missing(state)
    try:
        found = read_metrics(run.folder / METRICS_FILE)
    except (DataError, OSError) as error:
        problem = problem or f"no metrics can be read: {error}"
    logged = [(row.iteration, row.to_log()) for row in found]
    curve = tuple((number, log[metric]) for number, log in logged if metric in log)
    if not problem and not curve:
        problem = _not_logged(metric, [name for _, log in logged for name in log])
    tail = [value for _, value in curve[-last:]]
    kls = [row.kl_ref for row in found[-last:] if row.kl_ref is not None]
    health, severity = _health(found)
    return Measured(
        seed=run.seed,
        state=state,
        curve=curve,
        level=fmean(tail) if tail and not problem else None,
        kl=fmean(kls) if kls and not problem else None,
        health=health,
        severity=severity,
        problem=problem,
    )


def compare(
    measured: Sequence[tuple[Arm, Sequence[Measured]]], metric: str, last: int
) -> Comparison:
    """Lay the arms beside each other.

    Args:
        measured: Runs of each arm, the base first.
        metric: Logged name.
        last: Iterations at the end of a run that are averaged.
    """
    base = _levels(measured[0][1]) if measured else {}
    rows = []
    for place, (arm, runs) in enumerate(measured):
        levels = _levels(runs)
        shared = [levels[seed] - base[seed] for seed in levels if seed in base]
        kls = [run.kl for run in runs if run.kl is not None]
        seconds = [run.state.seconds for run in runs if run.state.status == "finished"]
        rows.append(
            Row(
                arm=arm,
                runs=tuple(runs),
                metric=mean_of(list(levels.values())),
                difference=mean_of(shared) if place > 0 else None,
                kl=fmean(kls) if kls else None,
                seconds=fmean(seconds) if seconds else None,
                health=_worst(runs),
            )
        )
    notes = _notes(rows, metric, last)
    return Comparison(metric=metric, last=last, rows=tuple(rows), notes=notes)


def _missing(state: State) -> str:
    """Say why a run has no result yet; empty where it is finished."""
    if state.status == "finished":
        return ""
    if state.status == "failed":
        return state.error or "failed"
    if state.status == "waiting":
        return "not started"
    return "cut off; the same command goes on with it"


def _not_logged(metric: str, names: Iterable[str]) -> str:
    known = sorted(set(names))
    if not known:
        return "it ended before its first iteration was over"
    near = nearest(metric, known)
    hint = f"; did you mean `{near}`?" if near else "."
    return f"it has not logged `{metric}`{hint}"


def _health(rows: Sequence[IterationStats]) -> tuple[str, int]:
    examiner = Examiner()
    for row in rows:
        examiner.examine(row)
    summary = examiner.summary()
    ranks = [rank_of(one.severity) for one in summary if one.severity != "watch"]
    return (headline(summary) if rows else ""), max(ranks, default=HEALTHY)


def _worst(runs: Sequence[Measured]) -> str:
    """Return the worst diagnosis, with its seed where there are several."""
    known = [run for run in runs if run.health]
    if not known:
        return ""
    worst = max(known, key=lambda run: run.severity)
    where = f" (seed {worst.seed})" if len(runs) > 1 and worst.severity > HEALTHY else ""
    return f"{worst.health}{where}"


def _levels(runs: Sequence[Measured]) -> dict[int, float]:
    return {run.seed: run.level for run in runs if run.level is not None}


def _notes(rows: Sequence[Row], metric: str, last: int) -> tuple[str, ...]:
    if not rows:
        return ()
    notes = [
        f"Each figure is the mean over seeds of `{metric}` over the last {last} iterations in "
        "which it was measured."
    ]
    num_seeds = len(rows[0].runs)
    if num_seeds == 1:
        notes.append("One seed: there are no intervals, and a difference may be chance.")
    else:
        notes.append(
            f"Intervals are 95 % t intervals over {num_seeds} seeds; differences are paired by "
            "seed."
        )
        notes += _told_apart(rows[1:])
    left_out = sum(len(row.problems) for row in rows)
    if left_out:
        notes.append(f"{left_out} of {sum(len(row.runs) for row in rows)} runs are missing in it.")
    return tuple(notes)


def _told_apart(rows: Sequence[Row]) -> list[str]:
    apart: Mapping[str, list[str]] = {"Higher": [], "Lower": []}
    for row in rows:
        found = row.difference
        if found is not None and found.excludes_zero:
            apart["Higher" if found.mean > 0 else "Lower"].append(row.arm.label)
    told = [f"{way} than the base: {'; '.join(arms)}." for way, arms in apart.items() if arms]
    judged = [row for row in rows if row.difference is not None and row.difference.low is not None]
    if not judged:
        return []
    if not told:
        return ["No arm can be told from the base."]
    return told if len(judged) < _MANY else [*told, _CHANCE]
