"""Processes of this machine: which they are, whether they are there, and their end."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

_DEAD = ("Z", "X")  # has ended, and its parent has not asked yet


def machine_name() -> str:
    """Name that two processes share if each can see the other by its number."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        names.append(str(os.stat("/proc/self/ns/pid").st_ino))  # of a container
    return "/".join(names)


def birth_of(pid: int) -> int | None:
    """When a process began, in the system's ticks; None where the system does not say.

    With it a number that was given anew is not taken for the process that had it before.
    """
    state = _state_of(pid)
    return None if state is None else state[1]


def is_gone(pid: int, birth: int | None) -> bool:
    """Whether a process of this machine has ended.

    Args:
        pid: Its number.
        birth: Of ``birth_of``, asked while it was there.
    """
    if birth is None:
        return not _answers(pid)
    state = _state_of(pid)
    return state is None or state[0] in _DEAD or state[1] != birth


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine stands still until it is told to go on (SIGSTOP)."""
    state = _state_of(pid)
    return state is not None and state[0] in ("T", "t")


def kill(pid: int, birth: int | None) -> None:
    """End a process of this machine at once, also a stopped one; only if it is surely the one."""
    if birth is not None and not is_gone(pid, birth):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _state_of(pid: int) -> tuple[str, int] | None:
    """Letter of the state, and the birth, of Linux's ``/proc``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[19])
