"""Find the newest checkpoint that a run can be resumed from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_lightning.checkpointing.entry import KEY
from ppo_lightning.checkpointing.parts import is_in_parts
from ppo_lightning.checkpointing.reading import read_checkpoint
from ppo_lightning.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Newest:
    """What a search for checkpoints found.

    Args:
        path: The newest that a run can be resumed from; None if there is none.
        iterations: How many iterations are behind it.
        steps: Optimiser steps behind it, of a supervised run; None of another.
        skipped: A line for each newer file that cannot be resumed, with the reason.
    """

    path: Path | None = None
    iterations: int = 0
    steps: int | None = None
    skipped: tuple[str, ...] = ()


def newest_good(folders: Iterable[str | os.PathLike[str]]) -> Newest:
    """Find the checkpoint that was written last among those that can be resumed.

    Args:
        folders: Searched with all that is below them for ``*.ckpt``; they need not be there.
    """
    skipped: list[str] = []
    for path in _newest_first(folders):
        checkpoint, problem = _read(path)
        if problem is None:
            iterations = int(checkpoint["epoch"]) + 1
            steps = checkpoint[KEY].get("steps_done")
            return Newest(path=path, iterations=iterations, steps=steps, skipped=tuple(skipped))
        skipped.append(f"`{path}` {problem}")
    return Newest(skipped=tuple(skipped))


def why_not(path: str | os.PathLike[str]) -> str | None:
    """Say why a run cannot be resumed from a file, in words that follow its name; None if it can.

    The file is mapped rather than read, so this takes no time and no memory even if it is large.
    """
    return _read(Path(path))[1]


def _newest_first(folders: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Files by the time they were written; of one time, ``last.ckpt`` comes first."""
    found = {path for folder in folders for path in Path(folder).rglob("*.ckpt")}
    # A link whose file is gone (`save_last: link`, killed between two files) is no file.
    files = [path for path in found if path.is_file() or is_in_parts(path)]
    return sorted(files, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _read(path: Path) -> tuple[Mapping[str, Any], str | None]:
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointError as error:
        return {}, str(error)
    entry = checkpoint.get(KEY)
    if not isinstance(entry, Mapping):
        return {}, "was not written by PPOModule"
    if not entry.get("complete", False):
        return {}, "was written inside an iteration"
    if not {"optimizer_states", "loops", "epoch"} <= checkpoint.keys():
        return {}, "holds weights only"
    return checkpoint, None
