"""The folder of a run, and how an earlier run's file in it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ppo_lightning.distributed import is_distributed, world_size

T = TypeVar("T")


def set_aside(path: Path) -> Path | None:
    """Keep a file under another name: ``name.ext`` becomes ``name.1.ext``, or the next free number.

    Returns:
        The other name; None if there is no such file.
    """
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target


def gathered(items: list[T]) -> list[T]:
    """Put the lists of all ranks together, rank by rank. To be called on all of them."""
    if not is_distributed():
        return items
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]
