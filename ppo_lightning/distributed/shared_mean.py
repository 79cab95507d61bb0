"""Gradients of ranks on one machine, averaged in memory that all of them see.

DDP keeps gradients in buckets. These are moved to shared memory; when all are full, each rank
averages its share of every bucket, and writes it to the buckets of all. Nothing is copied or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ppo_lightning.distributed.reduce import any_rank, is_distributed, rank, world_size
from ppo_lightning.distributed.shared_memory import seen_by_all, why_not_shared

BLOCK = 1 << 16
"""Numbers that are added up at a time: of a few ranks they fit a core's own cache."""

_ALIGNED = 64
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_CPU = torch.device("cpu")

Blocks: TypeAlias = list[tuple[Tensor, ...]]


def average_in_shared_memory(model: DistributedDataParallel) -> str:
    """Have DDP average gradients in shared memory. To be called on all ranks, before a backward.

    Args:
        model: Has no communication hook.

    Returns:
        Why that cannot be, the same on all ranks: DDP is left as it was then. Empty if all is well.
    """
    trained = [p for p in model.module.parameters() if p.requires_grad]
    reason = _why_not_averaged(model, trained) or why_not_shared(sum(p.nbytes for p in trained))
    if not reason:
        model.register_comm_hook(SharedMean(), _take)
    return reason


def _take(state: SharedMean, bucket: Any) -> torch.futures.Future[Tensor]:
    return state.take(bucket.buffer(), is_first=bucket.index() == 0, is_last=bucket.is_last())


_take.__annotations__.clear()  # DDP compares them with classes, and they are texts


def _why_not_averaged(model: DistributedDataParallel, trained: Sequence[Tensor]) -> str:
    if not is_distributed() or "gloo" not in dist.get_backend():
        return "ranks do not use gloo"
    for parameter in trained:
        if parameter.device.type != "cpu" or parameter.dtype not in _DTYPES:
            return f"a weight is {parameter.dtype} on {parameter.device}"
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return "an embedding has sparse gradients"
    return ""


class SharedMean:
    """Averages DDP's buckets, once the last one of a backward pass is full.

    Sums are made in the order of ranks, each number on one rank, so all have the same, bit for bit.
    Ranks wait for each other in collectives alone, which fail as DDP's own if a rank is lost. Where
    buckets cannot be shared after all, they are averaged by DDP's way from then on.
    """

    def __init__(self) -> None:
        self._full: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []
        self._blocks: Blocks = []
        self.gave_up = False

    def take(
        self, bucket: Tensor, *, is_first: bool, is_last: bool
    ) -> torch.futures.Future[Tensor]:
        """Take a full bucket; with the last one all are averaged.

        Args:
            bucket: ``[N]``; gets the mean.
            is_first: Whether it is the first of a backward pass.
            is_last: Whether it is the last of it.

        Returns:
            The bucket, when it is averaged.
        """
        if is_first:  # the backward pass before may have failed
            self._full = []
        averaged: torch.futures.Future[Tensor] = torch.futures.Future()
        self._full.append((bucket, averaged))
        if is_last:
            full, self._full = self._full, []
            self._average([bucket for bucket, _ in full])
            for bucket, future in full:
                future.set_result(bucket)
        return averaged

    @torch.no_grad()
    def _average(self, buckets: list[Tensor]) -> None:
        fresh = not all(_is_shared(bucket) for bucket in buckets)
        if fresh:  # DDP has laid them out anew, and others may let go of the old ones
            self._blocks = []
        # All buckets of all ranks are full once this is agreed on.
        if any_rank(fresh and not self.gave_up, _CPU):
            self._share(buckets)
        if self.gave_up:
            for bucket in buckets:
                dist.all_reduce(bucket.div_(world_size()))
            return
        _average_blocks(self._blocks)
        any_rank(False, _CPU)  # no bucket may be read before all ranks have written

    def _share(self, buckets: Sequence[Tensor]) -> None:
        try:
            everyone = seen_by_all(buckets)
        except OSError:
            self.gave_up = True
            return
        self._blocks = [
            block
            for alike in zip(*everyone, strict=True)
            for block in _blocks_of_share(alike, number=rank(), shares=world_size())
        ]


def _is_shared(tensor: Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _blocks_of_share(buckets: Sequence[Tensor], *, number: int, shares: int) -> Blocks:
    """Cut one share of each rank's bucket into blocks.

    Args:
        buckets: By rank, ``[N]`` each.
        number: Of the share, from 0.
        shares: Their number.
    """
    size = buckets[0].numel()
    bounds = [size * n // shares // _ALIGNED * _ALIGNED for n in range(shares)] + [size]
    begin, end = bounds[number : number + 2]
    return list(zip(*(torch.split(bucket[begin:end], BLOCK) for bucket in buckets), strict=True))


def _average_blocks(blocks: Blocks) -> None:
    """Write the mean of each block's ranks to all of them."""
    for first, second, *others in blocks:
        total = first + second
        for other in others:
            total += other
        torch.div(total, 2 + len(others), out=first)
        second.copy_(first)
        for other in others:
            other.copy_(first)
