"""Memory of the host that a step frees and the next one asks for."""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of ``mallopt``, from malloc.h
KEPT_BYTES = 256 * 2**20
"""At the end of the heap."""

_SETTINGS = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: KEPT_BYTES, _TOP_PAD: 64 * 2**20}


def keep_freed_memory() -> bool:
    """Let glibc keep up to 256 MiB at the end of its heap, for the rest of the process.

    By itself it gives them back to the system time and again, and every page is cleared when it is
    asked for anew: up to a tenth of the time of a small model's step on a CPU. A variable
    ``MALLOC_…`` or ``GLIBC_TUNABLES`` in the environment forbids it, and an allocator that has been
    loaded in the place of glibc's does not notice.

    Returns:
        Whether glibc took the settings.
    """
    own = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if own or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _SETTINGS.items())
