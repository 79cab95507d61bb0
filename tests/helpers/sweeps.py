"""Sweeps without training: a runner that writes metrics as a run would, and what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import IterationStats, MetricsWriter
from ppo_lightning.metrics.validation import AnswerStats
from ppo_lightning.studies import Outcome, Run

METRIC = "val/sampled/gold"
BASE_CONFIG: Mapping[str, Any] = {
    "seed_everything": 7,
    "trainer": {"default_root_dir": None, "logger": None, "max_epochs": 3},
    "model": {"init_args": {"ppo": {"clip_range": 0.2}, "kl": {"coef": 0.05}}},
}


def resolve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config above with some settings in it, `init_args` left out of their keys or not."""
    config = json.loads(json.dumps(BASE_CONFIG))
    for key, value in settings.items():
        *above, last = [part for part in key.split(".") if part != "init_args"]
        place = config
        for part in above:
            place = place[part]
            place = place.get("init_args", place)
        place[last] = value
    return config


def write_metrics(folder: Path, golds: list[float | None], *, kl: float = 1.0) -> None:
    """Leave `metrics.jsonl` as a run with these gold scores would."""
    writer = MetricsWriter(folder / "metrics.jsonl")
    for iteration, gold in enumerate(golds):
        answers = None if gold is None else AnswerStats(gold=gold, score=2 * gold)
        writer.write(
            IterationStats(iteration=iteration, kl_ref=kl + iteration, val_sampled=answers)
        )


class FakeRunner:
    """Makes runs by a function in the place of a process.

    Args:
        golds: Gives the gold scores of a run, or raises; or an `Outcome` that is no success.
    """

    def __init__(self, golds: Callable[[Run], list[float | None] | Outcome]) -> None:
        self.golds = golds
        self.made: list[tuple[str, int, bool]] = []
        self.stopped = threading.Event()
        self.killed = False

    def __call__(self, run: Run, *, again: bool) -> Outcome:
        if self.stopped.is_set():
            return Outcome(status="stopped")
        self.made.append((run.arm, run.seed, again))
        found = self.golds(run)
        if isinstance(found, Outcome):
            return found
        write_metrics(run.folder, found)
        return Outcome(status="finished")

    def stop(self) -> None:
        self.stopped.set()

    def kill(self) -> None:
        self.killed = True
        self.stopped.set()


class FakeConfig:
    """A config in the place of one that the parser reads.

    Args:
        arguments: Options of `fit`; `--trainer.max_epochs=N` is known.
    """

    name = "c"
    seed = 1

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self.base = resolve({})
        for argument in arguments:
            if argument.startswith("--trainer.max_epochs="):
                self.base["trainer"]["max_epochs"] = int(argument.partition("=")[2])

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in settings.items():
            if key.endswith("clip_range") and not 0 < value < 1:
                raise ConfigError(f"`clip_range` must lie in (0, 1), got {value}.")
        return resolve(settings) if settings else self.base

    def metric(self, wanted: str | None) -> str:
        return wanted or METRIC
