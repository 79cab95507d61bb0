"""Ranks as threads of one process, for functions that take a ``reduce``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def on_ranks(
    function: Callable[[Callable[[Tensor], Tensor], int], Result], num_ranks: int
) -> list[Result]:
    """Call ``function(reduce, rank)`` on each rank, where ``reduce`` adds over all of them.

    A rank that reduces more often or less often than the others breaks the barrier: an error and
    no hang.
    """
    barrier = threading.Barrier(num_ranks, timeout=20)
    parts: list[Tensor] = [torch.empty(0)] * num_ranks

    def run(rank: int) -> Result:
        def reduce(vector: Tensor) -> Tensor:
            assert vector.dtype == torch.float64
            assert vector.dim() == 1
            parts[rank] = vector
            barrier.wait()
            total = torch.stack(parts).sum(0)
            barrier.wait()
            return total

        try:
            return function(reduce, rank)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
