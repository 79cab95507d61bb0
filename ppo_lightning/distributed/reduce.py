"""Sums and collections over ranks; on one process each is the identity.

A *replica* is what holds one whole model: a rank, or under tensor parallel a few ranks, its peers,
which see the same responses. Responses are shared out over replicas, and what is measured is added
up over them; each peer has the same sums, bit for bit. Decisions are agreed on by all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_lightning.distributed.progress import pulse
from ppo_lightning.distributed.shards import is_shard

T = TypeVar("T")

_replicas: dist.ProcessGroup | None = None  # None is all ranks
_peers: dist.ProcessGroup | None = None  # None is this rank alone


def use_replicas(
    replicas: dist.ProcessGroup | None = None, peers: dist.ProcessGroup | None = None
) -> None:
    """Say which ranks hold a model between them; each by itself, unless told otherwise.

    Args:
        replicas: This rank and those of other replicas that hold the same part as it does.
        peers: This rank and those that hold the other parts.
    """
    global _replicas, _peers
    _replicas, _peers = replicas, peers


def replica_group() -> dist.ProcessGroup | None:
    """Ranks that sums are made over; None is all of them."""
    return _replicas


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


def replica() -> int:
    """Number of this rank's replica, from 0."""
    return dist.get_rank(_replicas) if is_distributed() else 0


def peer() -> int:
    """Number of this rank among those that hold its replica between them, from 0."""
    return 0 if _peers is None else dist.get_rank(_peers)


def num_replicas() -> int:
    """Number of replicas; of processes, unless some hold a model between them."""
    return dist.get_world_size(_replicas) if is_distributed() else 1


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all replicas; the argument is left alone.

    Args:
        values: Of one shape on all ranks, on the device of the process group.
    """
    return _all_reduce(values, dist.ReduceOp.SUM) if is_distributed() else values


def all_reduce_max(values: Tensor) -> Tensor:
    """Largest value over all ranks, element by element."""
    return _all_reduce(values, dist.ReduceOp.MAX) if is_distributed() else values


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    reduced = values.detach().clone()
    with pulse.waiting():
        dist.all_reduce(reduced, op=op, group=_replicas)
        if _peers is not None:  # the order of sums may differ: what is decided on them must not
            dist.broadcast(reduced, group=_peers, group_src=0)
    return reduced


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, peers too; the argument is left alone."""
    if not is_distributed():
        return values
    reduced = values.detach().clone()
    with pulse.waiting():
        dist.all_reduce(reduced)
    return reduced


def max_over_ranks(number: int, device: torch.device) -> int:
    """Largest of one whole number over all ranks."""
    if not is_distributed():
        return number
    found = torch.tensor(number, device=device)
    with pulse.waiting():  # on a GPU it is the second line that waits
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether ``flag`` holds on any rank: the one answer that all ranks act on."""
    return bool(max_over_ranks(int(flag), device))


def gather_objects(items: Sequence[T]) -> list[T]:
    """Put the items of all replicas together, one after the other. To be called on all ranks.

    Args:
        items: This replica's, maybe none; whatever can be pickled.
    """
    return _gathered(items, _replicas)


def gather_from_ranks(items: Sequence[T]) -> list[T]:
    """Put the items of all ranks together, peers too. To be called on all of them."""
    return _gathered(items, None)


def _gathered(items: Sequence[T], group: dist.ProcessGroup | None) -> list[T]:
    if not is_distributed():
        return list(items)
    parts: list[Any] = [None] * dist.get_world_size(group)
    with pulse.waiting():
        dist.all_gather_object(parts, list(items), group=group)
    return [item for part in parts for item in part]
