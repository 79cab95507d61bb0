"""What the file system refused, in one line: path, reason, way out."""

from __future__ import annotations

import errno
import os

_FULL = "Make room on its disk, or write elsewhere (`trainer.default_root_dir` of a run)."
_NOT_ALLOWED = (
    "See that it may be written to (or read), or write elsewhere "
    "(`trainer.default_root_dir` of a run)."
)
_NO_PLACE = (
    "See that the folders above it are there and can be made, or give another "
    "(`trainer.default_root_dir` of a run)."
)

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


def file_problem(error: BaseException) -> str | None:
    """Say what a user can do about an error of the file system; None if it is another.

    Args:
        error: That ended the command.
    """
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    said = f"{error.strerror or os.strerror(error.errno)}. {_REMEDIES[error.errno]}"
    if error.filename is not None:
        return f"`{os.fsdecode(error.filename)}`: {said}"
    if error.errno in _WITHOUT_PATH:
        return f"a file could not be written: {said}"
    return None
