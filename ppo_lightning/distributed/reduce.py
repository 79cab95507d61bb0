"""Sums and collections over ranks; on one process each is the identity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_lightning.distributed.shards import is_shard

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def shares_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether ranks may add gradients up parameter by parameter, so that all must get one.

    DDP does, on one rank too; weights in shards come with their own sums.
    """
    up = dist.is_available() and dist.is_initialized()
    return up and not any(is_shard(parameter) for parameter in parameters)


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks; the argument is left alone.

    Args:
        values: Of one shape on all ranks, on the device of the process group.
    """
    return _all_reduce(values, dist.ReduceOp.SUM) if is_distributed() else values


def all_reduce_max(values: Tensor) -> Tensor:
    """Largest value over all ranks, element by element."""
    return _all_reduce(values, dist.ReduceOp.MAX) if is_distributed() else values


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = values.detach().clone()
    dist.all_reduce(reduced, op=op)
    return reduced


def max_over_ranks(number: int, device: torch.device) -> int:
    """Largest of one whole number over all ranks."""
    if not is_distributed():
        return number
    return int(all_reduce_max(torch.tensor(number, device=device)))


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank: the one answer that all ranks act on."""
    return bool(max_over_ranks(int(flag), device))


def gather_objects(items: Sequence[T]) -> list[T]:
    """Put the items of all ranks together, rank by rank. To be called on all of them.

    Args:
        items: This rank's, maybe none; whatever can be pickled.
    """
    if not is_distributed():
        return list(items)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, list(items))
    return [item for part in parts for item in part]
