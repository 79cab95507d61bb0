"""The work of a sweep: arms, their runs, and what is told and written on the way."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ppo_lightning.errors import ConfigError
from ppo_lightning.io import write_json_atomic, write_text_atomic
from ppo_lightning.studies import (
    BASE,
    Arm,
    Comparison,
    Measured,
    Run,
    Runner,
    Search,
    State,
    Trial,
    Variation,
    arms_of,
    as_json,
    as_markdown,
    as_text,
    compare,
    ends_of,
    execute,
    make_arm,
    measure,
    read_state,
    run_search,
    runs_of,
    short_names,
    write_page,
    written,
)

if TYPE_CHECKING:
    from ppo_lightning.cli.sweep import Asked


class Work:
    """Makes the runs of a sweep, and keeps its table up to date.

    Args:
        asked: The sweep.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._runner: Runner | None = None
        self.arms: list[Arm] = []
        self.same_as_base: tuple[str, ...] = ()
        self._names = short_names([one.key for one in asked.varied])
        self._done: dict[Path, Measured] = {}

    def check(self) -> None:
        """Read the config of every arm, or of a search's ends; no run has started yet.

        Raises:
            ConfigError: The config refuses a key or a value.
        """
        resolve = self.asked.config.resolve
        if self.asked.trials is None:
            values = [one for one in self.asked.varied if isinstance(one, Variation)]
            found = arms_of(values, resolve, grid=self.asked.grid)
            self.arms, self.same_as_base = list(found.all), found.same_as_base
            return
        for settings in ends_of(self.asked.varied):
            make_arm(settings, self._names, resolve)
        self.arms = [Arm(name=BASE, settings={}, config=resolve({}), label=BASE)]

    def go_on(self, runner: Runner) -> int:
        """Make what is left to be made, and print the table.

        Args:
            runner: Of single runs.

        Returns:
            0, or 1 where a run has failed.
        """
        self._runner = runner
        for label in self.same_as_base:
            _say(f"{label} is what the config has: it is the base, and is not run twice.")
        try:
            self._make([run for arm in self.arms for run in self._runs(arm)])
            if self.asked.trials is not None:
                self._search(self.asked.trials)
        finally:
            comparison = self._write(with_page=True)
            print(as_text(comparison))
            for line in best_trial(comparison) if self.asked.trials is not None else ():
                print(line)
            print(f"\n{self.asked.out / 'sweep.md'}, sweep.json; {self.asked.html}")
        failed = any(run.state.status == "failed" for row in comparison.rows for run in row.runs)
        return int(failed)

    # ------------------------------------------------------------------ runs

    def _runs(self, arm: Arm) -> list[Run]:
        return runs_of(arm, self.asked.seeds, self.asked.out)

    def _make(self, runs: Sequence[Run]) -> None:
        assert self._runner is not None  # `go_on` has set it
        execute(runs, self._runner, processes=self.asked.processes, tell=self._tell)

    def _tell(self, run: Run, state: State) -> None:
        if state.status == "running":
            again = "goes on" if state.attempts > 1 else "starts"
            _say(f"{run}: {again}")
            return
        reason = f": {state.error}" if state.error else ""
        _say(f"{run}: {state.status} after {state.seconds:.0f} s{reason}")
        self._write(with_page=False)

    # ------------------------------------------------------------------ search

    def _search(self, num_trials: int) -> None:
        seed = self.asked.seeds[0]
        search = Search(self.asked.out, self.asked.varied, seed=seed)
        for trial in search.trials():
            if not trial.is_open:
                self._take(trial)
        batch = max(1, self.asked.processes // len(self.asked.seeds))
        run_search(search, num_trials, batch, self._run_trials)

    def _take(self, trial: Trial) -> Arm | None:
        """Make the trial's arm; None where values that go well alone do not go together."""
        resolve = self.asked.config.resolve
        try:
            arm = make_arm(trial.settings, self._names, resolve, name=trial.name)
        except ConfigError as error:
            _say(f"{trial.name} counts as failed: {error}")
            return None
        self.arms.append(arm)
        return arm

    def _run_trials(self, trials: Sequence[Trial]) -> Mapping[int, float | None]:
        arms = [self._take(trial) for trial in trials]
        self._make([run for arm in arms if arm is not None for run in self._runs(arm)])
        levels = [None if arm is None else self._level(arm) for arm in arms]
        return {trial.number: level for trial, level in zip(trials, levels, strict=True)}

    def _level(self, arm: Arm) -> float | None:
        """Return the mean of the metric; None where a seed is missing."""
        runs = [self._measured(run) for run in self._runs(arm)]
        levels = [run.level for run in runs if run.level is not None]
        return fmean(levels) if len(levels) == len(runs) else None

    # ------------------------------------------------------------------ results

    def _measured(self, run: Run) -> Measured:
        """Read what a run has left; a finished one once, for it stays as it is."""
        found = self._done.get(run.folder)
        if found is None:
            found = measure(run, read_state(run.folder), self.asked.metric, self.asked.last)
            if found.state.status == "finished":
                self._done[run.folder] = found
        return found

    def _write(self, *, with_page: bool) -> Comparison:
        asked = self.asked
        measured = [(arm, [self._measured(run) for run in self._runs(arm)]) for arm in self.arms]
        comparison = compare(measured, asked.metric, asked.last)
        title = f"Sweep of {asked.config.name}"
        write_json_atomic(asked.out / "sweep.json", as_json(comparison, asked.definition))
        write_text_atomic(asked.out / "sweep.md", as_markdown(title, comparison))
        if with_page and not write_page(asked.html, title, comparison):
            _say('the page has no plots: `pip install "ppo-lightning[report]"` brings matplotlib.')
        return comparison


def best_trial(comparison: Comparison) -> list[str]:
    """Say which trial of a search was best, and what that is worth.

    Args:
        comparison: The base first, and then the trials.
    """
    trials = comparison.rows[1:]
    means = [(row.metric.mean, row) for row in trials if row.metric and not row.problems]
    known = [(mean, row) for mean, row in means if math.isfinite(mean)]
    if not known:
        return []
    _, best = max(known, key=lambda found: found[0])
    settings = [f"{key}={written(value)}" for key, value in best.arm.settings.items()]
    options = " ".join(f"--vary {shlex.quote(setting)}" for setting in settings)
    return [
        f"The best of {len(trials)} trials: {best.arm.label} ({best.arm.name}).",
        "The best of many is lucky, too. Compare it with the config again, with other seeds: "
        f"{options} --grid --seeds N,N,N --out DIR",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
