"""Write a checkpoint file wholly or not at all, and clear away what a killed run left of one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch

from ppo_lightning.distributed import fault_point, pulse
from ppo_lightning.errors import CheckpointError
from ppo_lightning.io import open_atomic

# What `open_atomic` calls an unfinished checkpoint, and a snapshot to go back to.
_UNFINISHED = (".*.ckpt.*.tmp", ".after_*_iterations.rank_*.pt.*.tmp")
_FORMER = ".*.ckpt.*.old"  # a checkpoint in parts that another has just taken the name from


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint to a temporary file, bring it to the disk and give it its name.

    Whatever ends the process, the name stands for a whole file: the new one or the former.

    Raises:
        CheckpointError: The disk is full, or the file cannot be written for another reason; the
            former file is as it was.
    """
    try:
        with _out_of_the_way(Path(path)), open_atomic(path, follow_links=False) as file:
            lock(file)
            into: Any = Watched(file)
            torch.save(checkpoint, into)
            file.flush()
            fault_point("checkpoint_written")
    except (OSError, RuntimeError) as error:
        cause = system_error(error)
        if cause is None:
            raise
        raise CheckpointError(_message(path, cause)) from error
    fault_point("checkpoint_renamed")


@contextmanager
def _out_of_the_way(path: Path) -> Iterator[None]:
    """Let a file take the name of a checkpoint in parts, which comes back if it cannot."""
    if not path.is_dir():
        yield
        return
    former = path.with_name(f".{path.name}.{uuid4().hex}.old")
    path.rename(former)
    try:
        yield
    except BaseException:
        former.rename(path)
        raise
    remove(former)


class Watched:
    """A file to write to, for ``torch.save``.

    Args:
        file: Gets the bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        """Write, and note that something was."""
        fault_point("checkpoint_write")
        pulse.beat()
        return self.file.write(data)

    def flush(self) -> None:
        """Hand over what is still in memory."""
        self.file.flush()


def lock(file: BinaryIO) -> None:
    """Show other runs that the file is being written; the lock dies with the process."""
    with suppress(OSError):  # a file system without locks: leftovers stay there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def system_error(error: BaseException) -> OSError | None:
    """Find the error of the file system, which torch's writer hides behind one of its own."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def _message(path: str | os.PathLike[str], cause: OSError) -> str:
    folder = Path(path).parent
    remedy = f"See that `{folder}` can be written to"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"Make room on the disk of `{folder}`"
    return (
        f"the checkpoint `{os.fspath(path)}` could not be written: {cause.strerror or cause}. "
        f"Earlier checkpoints are whole. {remedy}, and go on with `--ckpt_path last`."
    )


def remove_leftovers(folders: Iterable[Path]) -> list[Path]:
    """Delete unfinished checkpoint files of runs that were killed while they wrote.

    One that another run is writing at this moment is locked, and stays.

    Args:
        folders: Searched with all that is below them; they need not be there.

    Returns:
        What was deleted.
    """
    found = {path for f in folders for path in f.rglob(".*")}
    _rename_back(path for path in found if path.match(_FORMER))
    unfinished = {path for path in found if any(path.match(pattern) for pattern in _UNFINISHED)}
    return [path for path in sorted(unfinished) if _removed(path)]


def put_back(folders: Iterable[Path]) -> None:
    """Give checkpoints their names back where the next ones never got them; others go.

    Args:
        folders: Searched with all that is below them; they need not be there.
    """
    _rename_back({path for f in folders for path in f.rglob(_FORMER)})


def _rename_back(formers: Iterable[Path]) -> None:
    for former in formers:
        target = former.with_name(former.name[1:].rsplit(".", 2)[0])
        with suppress(FileNotFoundError):  # another rank was quicker
            if target.exists():
                remove(former)
            else:
                former.rename(target)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        with open(path, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _removed(path: Path) -> bool:
    if path.is_dir():  # of a checkpoint in parts
        parts = [part for part in path.iterdir() if part.is_file()]
        if any(_is_locked(part) for part in parts):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    # For writing, though nothing is written: NFS gives an exclusive lock to no other.
    with suppress(OSError), open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False
