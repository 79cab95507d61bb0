"""What the file system refused, in one line: path, reason, way out."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

_ELSEWHERE = ", or write elsewhere (`trainer.default_root_dir` of a run)"
_FULL = "Make room on its disk"
_NOT_ALLOWED = "See that it may be read, or written to"
_NO_PLACE = "See that it and the folders above it are there, or can be made"

_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _NOT_ALLOWED,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.ENOENT: _NO_PLACE,
    errno.ENOTDIR: _NO_PLACE,
    errno.EEXIST: _NO_PLACE,
}

_WITHOUT_PATH = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a write says where the file was opened by a library, which keeps its name to itself."""


def file_problem(error: BaseException, folders: Sequence[Path] = ()) -> str | None:
    """Say what a user can do about an error of the file system; None if it is another.

    Args:
        error: That ended the command.
        folders: Where a run writes. A file elsewhere, such as a list that a reward reads, is not
            helped by another folder.
    """
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    said = f"{error.strerror or os.strerror(error.errno)}. {_REMEDIES[error.errno]}"
    if error.filename is not None:
        name = os.fsdecode(error.filename)
        way_out = _ELSEWHERE if any(_on_the_way(name, folder) for folder in folders) else ""
        return f"`{name}`: {said}{way_out}."
    if error.errno in _WITHOUT_PATH:
        return f"a file could not be written: {said}{_ELSEWHERE}."
    return None


def _on_the_way(name: str, folder: Path) -> bool:
    """Whether a file lies in a folder, or above it, where it may keep the folder from being."""
    path, folder = Path(name).absolute(), folder.absolute()
    return path == folder or folder in path.parents or path in folder.parents
