"""``ppo-lightning sweep``: a config with some settings varied, for the same seeds, compared."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lightning.cli.sweep_config import SweepConfig
    from ppo_lightning.studies import Range, Runner, Variation


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning sweep",
        usage="ppo-lightning sweep --config FILE --vary KEY=VALUES [options] [options of fit]",
        description="Run a config with one setting changed at a time, for the same seeds, and "
        "compare the arms with the config itself. The same command goes on with a sweep that was "
        "cut off. All that `fit` takes may follow. Exit code 0: all runs have finished; 1: some "
        "have failed; 2: something cannot be read.",
    )
    options.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="a setting and its values, as YAML with commas between them: "
        "`model.init_args.ppo.clip_range=0.1,0.3`; may be given several times. With --search also "
        "a range: `KEY=0.1..0.3`, on a log scale `KEY=log:1e-6..1e-4`",
    )
    options.add_argument("--grid", action="store_true", help="all combinations of the values")
    options.add_argument(
        "--search", type=int, metavar="N", help="N trials proposed by Optuna (extra `search`)"
    )
    options.add_argument(
        "--seeds", metavar="N,N", help="seeds of every arm, 0,1,2; else the config's own"
    )
    options.add_argument("--out", metavar="DIR", help="else sweeps/NAME, by the config's name")
    options.add_argument("--processes", type=int, default=1, metavar="N", help="runs at a time")
    options.add_argument(
        "--metric", metavar="NAME", help="what is compared; else the held-out score, by gold if any"
    )
    options.add_argument(
        "--last",
        type=int,
        default=5,
        metavar="N",
        help="measurements at the end of a run that are averaged (default 5)",
    )
    options.add_argument("--html", metavar="FILE", help="else sweep.html in the sweep's folder")
    return options


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sweep, read and checked.

    Args:
        config: That is varied.
        varied: Settings with values or ranges.
        grid: All combinations.
        trials: Of a search; None for a sweep.
        seeds: Of every arm.
        out: Folder.
        processes: Runs at a time.
        metric: Logged name.
        last: Measurements at the end of a run that are averaged.
        html: Page to write.
    """

    config: SweepConfig
    varied: tuple[Variation | Range, ...]
    grid: bool
    trials: int | None
    seeds: tuple[int, ...]
    out: Path
    processes: int
    metric: str
    last: int
    html: Path

    @property
    def definition(self) -> dict[str, Any]:
        """What may not change when the sweep goes on."""
        from ppo_lightning.studies import Variation, bare

        kind = "grid" if self.grid else "sweep" if self.trials is None else "search"
        vary = {
            one.key: list(one.values) if isinstance(one, Variation) else str(one)
            for one in self.varied
        }
        objective = {"metric": self.metric, "last": self.last} if kind == "search" else {}
        own = {"kind": kind, "vary": vary, "seeds": list(self.seeds)}
        return own | objective | {"config": bare(self.config.base)}


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given, rest = parser().parse_known_args(arguments)
    _check(given)
    asked = read(given, rest)
    from ppo_lightning.cli.sweep_work import Work
    from ppo_lightning.studies import keep_definition, locked

    work = Work(asked)
    work.check()
    with _told_to_end(), locked(asked.out) as lock:
        keep_definition(asked.out, asked.definition)
        return work.go_on(make_runner(asked, lock))


def read(given: argparse.Namespace, rest: Sequence[str]) -> Asked:
    """Read and check everything but the arms.

    Args:
        given: Options of the command.
        rest: Options of ``fit``.

    Raises:
        ConfigError: Something in them is wrong.
    """
    from ppo_lightning.studies import (
        Range,
        check_keys,
        parse_vary,
        require_folder,
        require_optuna,
    )

    seeds = None if given.seeds is None else parse_seeds(given.seeds)
    varied = [parse_vary(text) for text in given.vary]
    check_keys(varied, together=given.grid or given.search is not None)
    ranges = [one for one in varied if isinstance(one, Range)]
    if ranges and given.search is None:
        raise ConfigError(
            f"`--vary {ranges[0].key}={ranges[0]}` is a range, which needs `--search N`; give "
            "values for a sweep, as `KEY=0.1,0.2`."
        )
    if given.search is not None:
        require_optuna()
    from ppo_lightning.cli.sweep_config import SweepConfig, default_folder

    config = SweepConfig(rest)
    out = (Path(given.out) if given.out else default_folder(config)).absolute()
    require_folder(out)
    return Asked(
        config=config,
        varied=tuple(varied),
        grid=given.grid,
        trials=given.search,
        seeds=seeds or (config.seed,),
        out=out,
        processes=given.processes,
        metric=config.metric(given.metric),
        last=given.last,
        html=Path(given.html) if given.html else out / "sweep.html",
    )


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read ``0,1,2``.

    Raises:
        ConfigError: Not whole numbers that differ, or out of range.
    """
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"`--seeds {text}`: seeds are whole numbers with commas between them, as 0,1,2."
        ) from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"`--seeds {text}`: a seed stands there twice.")
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(f"`--seeds {text}`: seeds must lie in [0, {2**32 - 1}].")
    return seeds


def make_runner(asked: Asked, lock: int) -> Runner:
    """Return what makes single runs.

    Args:
        asked: The sweep.
        lock: Open file that keeps other sweeps out while a run is alive.
    """
    from ppo_lightning.studies import FitProcesses

    cores = len(os.sched_getaffinity(0))
    # Each process would take all cores for itself, and the more of them the slower all would be.
    threads = None if asked.processes == 1 else max(1, cores // asked.processes)
    return FitProcesses(keep_open=(lock,), threads=threads)


def _check(given: argparse.Namespace) -> None:
    for name in ("processes", "last", "search"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ConfigError(f"`--{name}` must be at least 1, got {value}.")
    if given.grid and given.search is not None:
        raise ConfigError("`--grid` and `--search` exclude each other; leave one out.")


@contextmanager
def _told_to_end() -> Iterator[None]:
    """End as after Ctrl-C when told to by SIGTERM, or when the terminal goes away."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
