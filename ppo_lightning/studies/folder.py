"""The folder of a sweep: what it was started with, and that only one sweep is at work in it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.io import read_json, write_json_atomic
from ppo_lightning.studies.runs import STATE_FILE, read_state
from ppo_lightning.studies.values import written

DEFINITION_FILE = "definition.json"
_LOCK_FILE = "sweep.lock"
_NOTHING = "nothing"


def require_folder(out: Path) -> None:
    """Refuse a file in the place of a sweep's folder, and a folder of something else.

    Raises:
        ConfigError: It is one of these.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ConfigError(f"`--out {out}` is a file; give a folder, which need not be there yet.")
    others = sorted(entry.name for entry in out.iterdir() if entry.name != _LOCK_FILE)
    if others and DEFINITION_FILE not in others:
        raise ConfigError(
            f"`--out {out}` holds `{others[0]}` and is no folder of a sweep; give another one, or "
            "an empty one."
        )


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """Let no other sweep into a folder.

    Yields:
        The open file that holds the lock. Runs are started with it: one that outlives a killed
        sweep keeps the next one out, or two would write into one folder.

    Raises:
        ConfigError: The folder is a file, or one of something else, or a sweep or a run is at work
            in it.
    """
    require_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(_at_work(out)) from error
        yield descriptor
    finally:
        os.close(descriptor)


def keep_definition(out: Path, definition: Mapping[str, Any]) -> None:
    """Write down what a sweep was started with, or compare it with what is written there.

    Args:
        out: Folder of the sweep.
        definition: Config, what is varied, seeds.

    Raises:
        ConfigError: It was started with something else, or the folder is that of something else.
        DataError: The file is damaged.
    """
    path = out / DEFINITION_FILE
    now = json.loads(json.dumps(definition, default=str))
    require_folder(out)
    if not path.exists():
        write_json_atomic(path, now)
        return
    before = read_json(path)
    if not isinstance(before, Mapping):
        message = "is no definition of a sweep. Give another folder with `--out`."
        raise DataError(message, path=path)
    if change := _first_change(before, now):
        key, old, new = change
        raise ConfigError(
            f"`{out}` holds a sweep with other settings: {key} was {old} there, and is {new} now. "
            "Give another folder with `--out`, or the settings of then; `definition.json` has them."
        )


def _first_change(before: Any, now: Any, key: str = "") -> tuple[str, str, str] | None:
    """Return the first key where two values differ, and both; None where none does."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in (*before, *(name for name in now if name not in before)):
            inner = f"{key}.{name}" if key else str(name)
            old, new = before.get(name, _NOTHING), now.get(name, _NOTHING)
            if change := _first_change(old, new, inner):
                return change
        return None
    if before == now:
        return None
    return f"`{key.removeprefix('config.')}`", f"`{written(before)}`", f"`{written(now)}`"


def _at_work(out: Path) -> str:
    states = (read_state(file.parent) for file in sorted(out.glob(f"*/*/{STATE_FILE}")))
    pids = [state.pid for state in states if state.status == "running" and state.pid]
    alive = [str(pid) for pid in pids if _is_alive(pid)]
    whose = f" Its runs are the processes {', '.join(alive)}." if alive else ""
    return (
        f"a sweep is at work in `{out}`, or one that was killed has left runs that still are."
        f"{whose} Wait for them, end them with `kill`, or give another folder with `--out`."
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
