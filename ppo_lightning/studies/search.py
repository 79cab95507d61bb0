"""A search over ranges of settings, by Optuna: it proposes arms, and is told how they did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lightning.errors import ConfigError
from ppo_lightning.studies.values import Range, Variation

JOURNAL_FILE = "search.journal"
_STUDY = "sweep"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One arm that the search has proposed.

    Args:
        number: From 0.
        settings: By key.
        is_open: Whether its result is still to be told.
    """

    number: int
    settings: Mapping[str, Any]
    is_open: bool

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"trial_{self.number:03d}"


class Search:
    """Optuna's tree-structured Parzen estimator over some settings, maximising.

    Every trial is kept in a journal in the sweep's folder. What is proposed depends on the results
    so far and on the trial's number, so a search that was cut off goes on as if it had not been.

    Args:
        out: Folder of the sweep.
        varied: Ranges, and settings with a few values each.
        seed: Of the proposals.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, out: Path, varied: Sequence[Variation | Range], *, seed: int = 0) -> None:
        require_optuna()
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.varied, self.seed = tuple(varied), seed
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(out / JOURNAL_FILE))),
            study_name=_STUDY,
            direction="maximize",
            load_if_exists=True,
        )

    def trials(self) -> list[Trial]:
        """Return all trials so far, also those that a search left open when it was cut off."""
        return [self._trial(trial) for trial in self._study.get_trials(deepcopy=False)]

    def ask(self) -> Trial:
        """Propose another trial."""
        import optuna

        number = len(self._study.get_trials(deepcopy=False))
        # A sampler that goes on from its first seed would propose the first trials once more.
        self._study.sampler = optuna.samplers.TPESampler(seed=self.seed + number)
        spaces = {one.key: _space(one) for one in self.varied}
        return self._trial(self._study.ask(spaces))

    def tell(self, trial: Trial, level: float | None) -> None:
        """Say how a trial did.

        Args:
            trial: An open one.
            level: What is maximised; None, or a number that is not finite, if it failed.
        """
        import optuna

        if level is None or not math.isfinite(level):
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial.number, level)

    def _trial(self, trial: Any) -> Trial:
        values = {
            one.key: one.values[trial.params[one.key]]
            if isinstance(one, Variation)
            else trial.params[one.key]
            for one in self.varied
        }
        state = getattr(trial, "state", None)  # one that was just asked for has none
        is_open = state is None or not state.is_finished()
        return Trial(number=trial.number, settings=values, is_open=is_open)


def run_search(
    search: Search, num_trials: int, batch: int, run: Callable[[Sequence[Trial]], Mapping[int, Any]]
) -> None:
    """Go on until there are as many trials as wanted.

    Args:
        search: With the trials so far; open ones come first.
        num_trials: In all, those of earlier calls counted.
        batch: Trials at a time.
        run: Makes the runs of some trials; returns the level of each by its number, None where it
            failed.
    """
    while True:
        trials = search.trials()
        todo = [trial for trial in trials if trial.is_open][:batch]
        room = min(batch - len(todo), num_trials - len(trials))
        todo += [search.ask() for _ in range(room)]
        if not todo:
            return
        levels = run(todo)
        for trial in todo:
            search.tell(trial, levels[trial.number])


def ends_of(varied: Sequence[Variation | Range]) -> list[dict[str, Any]]:
    """Return settings that should be tried out before a search: ends of ranges, and all values."""
    values = [
        (one.key, one.values if isinstance(one, Variation) else (one.low, one.high))
        for one in varied
    ]
    return [{key: value} for key, found in values for value in found]


def require_optuna() -> None:
    """Raise an error that names the extra, where Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "`--search` needs Optuna, which is not installed: `pip install "
            '"ppo-lightning[search]"`. Without it, `--vary` takes values: `KEY=0.1,0.2`.'
        ) from error


def _space(one: Variation | Range) -> Any:
    from optuna import distributions

    if isinstance(one, Variation):  # numbered: Optuna takes no lists or sections
        return distributions.CategoricalDistribution(range(len(one.values)))
    if isinstance(one.low, int) and isinstance(one.high, int):
        return distributions.IntDistribution(one.low, one.high, log=one.log)
    return distributions.FloatDistribution(one.low, one.high, log=one.log)
