"""Sums and collections over ranks; on one process each is the identity.

A *replica* is what holds one whole model: a rank, or under tensor parallel a few ranks, its peers,
which see the same responses. Responses are shared out over replicas, and what is measured is added
up over them; each peer has the same sums, bit for bit. Decisions are agreed on by all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_lightning.distributed.partitions import is_part
from ppo_lightning.distributed.progress import pulse
from ppo_lightning.distributed.shards import is_shard
from ppo_lightning.errors import RankError

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

    DDP does, on one rank too; weights in shards and DeepSpeed come with their own sums.
    """
    up = dist.is_available() and dist.is_initialized()
    return up and not any(is_shard(p) or is_part(p) for p in parameters)


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
    if not is_distributed():
        return values
    reduced = values.detach().clone()
    with pulse.waiting():
        dist.all_reduce(reduced, group=_replicas)
        if _peers is not None:  # the order of sums may differ: what is decided on them must not
            dist.broadcast(reduced, group=_peers, group_src=0)
    return reduced


def all_reduce_max(values: Tensor) -> Tensor:
    """Largest value over all ranks, peers too, element by element."""
    if not is_distributed():
        return values
    reduced = values.detach().clone()
    with pulse.waiting():
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return reduced


def from_first_peer(make: Callable[[], T]) -> T:
    """Make something on one rank of each replica, and give it to its peers.

    For what need not be the same twice, or costs: peers must see the very same.

    Args:
        make: Makes what can be pickled, on the CPU.

    Raises:
        RankError: It failed on the first peer; there its own error is raised.
    """
    if _peers is None:
        return make()
    failure: Exception | None = None
    parcel: list[Any] = [None, None]
    if peer() == 0:
        try:
            parcel[0] = make()
        except Exception as error:
            failure, parcel[1] = error, f"{type(error).__name__}: {error}"
    with pulse.waiting():
        dist.broadcast_object_list(parcel, group=_peers, group_src=0)
    if failure is not None:
        raise failure
    if parcel[1] is not None:
        raise RankError(f"a rank that holds the model together with this one failed: {parcel[1]}")
    made: T = parcel[0]
    return made


def require_alike_among_peers(values: Tensor) -> None:
    """Insist that ranks which hold a model between them have made the very same.

    Raises:
        RankError: Some have not; on all ranks.
    """
    if _peers is None:
        return
    first = from_first_peer(values.cpu)
    if any_rank(not torch.equal(first, values.cpu()), values.device):
        raise RankError(
            "ranks that hold a model between them (tensor parallel) have sampled different "
            "responses: their weights or their random numbers are not the same any more. Resume "
            "from an earlier checkpoint, or leave out `tensor_parallel_size`."
        )


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
