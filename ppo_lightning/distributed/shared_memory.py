"""Tensors of one rank in memory that all ranks of the machine see.

The memory of a tensor moves to a file that has no name any more before it is used, so nothing is
left behind however a process ends. Other ranks open it by its number in the owner's process.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.distributed.processes import machine_name
from ppo_lightning.distributed.reduce import gather_from_ranks, rank, world_size
from ppo_lightning.errors import first_line

FOLDER = "/dev/shm"
"""Where Linux keeps such files; what is free there bounds them."""


def why_not_shared(num_bytes: int) -> str:
    """Say why ranks cannot see each other's memory, or nothing. To be called on all of them.

    Args:
        num_bytes: That each rank would share.

    Returns:
        The same on all ranks.
    """
    if reason := _agreed(_why_no_room(num_bytes * world_size())):
        return reason
    if len(set(gather_from_ranks([machine_name()]))) > 1:
        return "ranks are on several machines, or in several containers"
    try:
        seen = seen_by_all([torch.full((1,), rank())])
    except OSError as error:
        return first_line(error)
    wrong = [owner for owner, (number,) in enumerate(seen) if int(number) != owner]
    return _agreed(f"what rank {wrong[0]} shares is not what others see" if wrong else "")


def seen_by_all(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Move the memory of tensors to where all ranks see it. To be called on all ranks.

    Args:
        tensors: On the CPU, contiguous, each all of its memory, alike on all ranks. They and their
            views stay what they are.

    Returns:
        Those of each rank, by rank, flat; what one writes, all see.

    Raises:
        OSError: Some rank cannot; on all of them.
    """
    handles: list[int] = []
    problem = ""
    try:
        handles = [tensor.untyped_storage()._share_fd_cpu_()[0] for tensor in tensors]
    except RuntimeError as error:  # no room, say
        problem = first_line(error)
    everyone = gather_from_ranks([(os.getpid(), handles)])
    if problem := _agreed(problem):
        raise OSError(problem)
    opened: list[list[Tensor]] = []
    try:
        for owner, (pid, numbers) in enumerate(everyone):
            theirs = [_open(pid, n, t) for n, t in zip(numbers, tensors, strict=True)]
            opened.append([t.view(-1) for t in tensors] if owner == rank() else theirs)
    except (OSError, ValueError) as error:
        problem = f"a rank cannot open another one's memory: {first_line(error)}"
    if problem := _agreed(problem):
        raise OSError(problem)
    return opened


def _open(pid: int, number: int, like: Tensor) -> Tensor:
    """Open a file of another process, of the size of a tensor."""
    file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        memory = mmap.mmap(file, like.nbytes)
    finally:
        os.close(file)
    return torch.frombuffer(memory, dtype=like.dtype)


def _why_no_room(num_bytes: int) -> str:
    if not sys.platform.startswith("linux"):
        return "it takes Linux"
    try:
        free = shutil.disk_usage(FOLDER).free
    except OSError as error:
        return first_line(error)
    if free >= num_bytes:
        return ""
    return f"`{FOLDER}` has {free / 2**20:.0f} MiB free, and they take {num_bytes / 2**20:.0f}"


def _agreed(problem: str) -> str:
    """First problem of any rank, on all of them; empty where none has one."""
    return next(filter(None, gather_from_ranks([problem])), "")
