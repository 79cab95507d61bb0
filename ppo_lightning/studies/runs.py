"""The runs of a sweep: one for each arm and seed, what became of each, some at a time."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ppo_lightning.errors import DataError, first_line
from ppo_lightning.io import read_json, write_json_atomic
from ppo_lightning.studies.arms import Arm

Status = Literal["waiting", "running", "finished", "failed", "stopped"]

STATE_FILE = "state.json"
_TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"


@dataclass(frozen=True, kw_only=True)
class State:
    """What has become of a run.

    Args:
        status: ``running`` is also what a killed sweep leaves behind.
        error: Why it failed, in one line.
        seconds: That its processes took, all attempts together.
        attempts: How often it was started.
        pid: Of the last process.
    """

    status: Status = "waiting"
    error: str = ""
    seconds: float = 0.0
    attempts: int = 0
    pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of ``fit``.

    Args:
        arm: Name of its arm.
        seed: Of everything random in it.
        folder: Of its own.
        config: Of ``fit``, whole.
    """

    arm: str
    seed: int
    folder: Path
    config: Mapping[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attempt ended.

    Args:
        status: ``finished``, ``failed`` by itself, or ``stopped`` by the sweep.
        error: Why it failed, in one line.
    """

    status: Literal["finished", "failed", "stopped"]
    error: str = ""


class Runner(Protocol):
    """Makes runs; called by several threads at once."""

    def __call__(self, run: Run, *, again: bool) -> Outcome:
        """Make a run, and return when it has ended.

        Args:
            run: Its folder is there.
            again: Whether it was begun before; it goes on where it can.
        """
        ...

    def stop(self) -> None:
        """Let runs end as soon as they can, and start no others."""
        ...

    def kill(self) -> None:
        """End runs at once."""
        ...


Tell = Callable[[Run, State], None]


def runs_of(arm: Arm, seeds: Sequence[int], out: Path) -> list[Run]:
    """Return the runs of an arm, with the same seeds as those of every other.

    Args:
        arm: With its config.
        seeds: One for each run.
        out: Folder of the sweep.
    """
    runs = []
    for seed in seeds:
        folder = out / arm.name / f"seed_{seed}"
        config = _placed(arm.config, seed, folder)
        runs.append(Run(arm=arm.name, seed=seed, folder=folder, config=config))
    return runs


def bare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what each run has of its own: seed, folder and logger."""
    left = copy.deepcopy(dict(config))
    left.pop("seed_everything", None)
    for key in ("default_root_dir", "logger"):
        left.get("trainer", {}).pop(key, None)
    return left


def _placed(config: Mapping[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Return a config that writes everything into a folder, for TensorBoard unless it says no."""
    placed = copy.deepcopy(dict(config))
    placed["seed_everything"] = seed
    trainer = placed.setdefault("trainer", {})
    trainer["default_root_dir"] = str(folder)
    if trainer.get("logger") is not False:
        place = {"save_dir": str(folder), "name": "", "version": ""}
        trainer["logger"] = {"class_path": _TENSORBOARD, "init_args": place}
    return placed


def read_state(folder: Path) -> State:
    """Return what has become of the run in a folder; one that is damaged counts as cut off.

    A whole file is written each time, so only hands and full disks damage it.
    """
    try:
        read = read_json(folder / STATE_FILE)
        names = {one.name for one in fields(State)}
        return State(**{key: value for key, value in read.items() if key in names})
    except FileNotFoundError:
        return State()
    except (DataError, TypeError, AttributeError):
        return State(status="stopped")


def write_state(folder: Path, **changes: Any) -> State:
    """Change what is kept of a run; the file is replaced whole."""
    state = replace(read_state(folder), **changes)
    write_json_atomic(folder / STATE_FILE, asdict(state))
    return state


def execute(runs: Sequence[Run], runner: Runner, *, processes: int, tell: Tell) -> None:
    """Make the runs that are not finished; one that fails leaves the others alone.

    Args:
        runs: In this order.
        runner: Of single runs.
        processes: How many at a time.
        tell: Called with every run that begins or ends, and its state, one call at a time.

    Raises:
        KeyboardInterrupt: All runs have been stopped.
    """
    waiting = [run for run in runs if read_state(run.folder).status != "finished"]
    lock = threading.Lock()

    def say(run: Run, state: State) -> None:
        with lock:
            tell(run, state)

    with ThreadPoolExecutor(max_workers=processes) as pool:
        try:
            futures = [pool.submit(_attempt, run, runner, say) for run in waiting]
            for future in as_completed(futures):
                say(*future.result())
        except BaseException:
            _end(pool, runner)
            raise


def _end(pool: ThreadPoolExecutor, runner: Runner) -> None:
    # First, or one that waits would begin when another is stopped.
    pool.shutdown(wait=False, cancel_futures=True)
    runner.stop()
    try:
        pool.shutdown()
    except BaseException:  # asked for a second time
        runner.kill()
        raise


def _attempt(run: Run, runner: Runner, tell: Tell) -> tuple[Run, State]:
    begun = time.monotonic()
    try:
        before = read_state(run.folder)
        again = before.attempts > 0
        run.folder.mkdir(parents=True, exist_ok=True)
        state = write_state(
            run.folder, status="running", error="", attempts=before.attempts + 1, pid=None
        )
        tell(run, state)
        outcome = runner(run, again=again)
        seconds = before.seconds + time.monotonic() - begun
        state = write_state(
            run.folder, status=outcome.status, error=outcome.error, seconds=seconds, pid=None
        )
    except Exception as error:  # of this one run: a full disk, a folder taken away
        return run, State(status="failed", error=f"{type(error).__name__}: {first_line(error)}")
    return run, state
