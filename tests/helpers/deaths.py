"""Processes that come to a bad end: each is forked, and hit at a place of the run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ppo_lightning.distributed import fault_point, shared_mean
from ppo_lightning.distributed.faults import FAULT_VARIABLE
from ppo_lightning.modules import collection
from ppo_lightning.rollout.engines import slots
from tests.helpers.processes import TIMEOUT_SECONDS, become_rank, free_port, server


def exit_codes(
    function: Callable[..., None],
    *arguments: Any,
    num_ranks: int = 1,
    faults: Mapping[int, str] | None = None,
    log: str | os.PathLike[str] = os.devnull,
) -> list[int | None]:
    """Call a function in processes of its own, some of which are hit.

    Args:
        function: Of a test module's top level.
        arguments: Handed to each.
        num_ranks: Processes; with one there is no process group.
        faults: ``name:count:signal`` by rank. Names are those of the package's fault points, and
            ``decode`` (before a token is sampled), ``score`` (before the networks score a buffer),
            ``sum`` (before gradients in shared memory are added up), ``step`` (before the
            optimiser's step) and ``save`` (on all ranks, before one writes).
        log: Gets what the processes print.

    Returns:
        By rank: the exit status, the number of the deadly signal as a negative number, or None
        for a process that did not end.
    """
    port, context = free_port(), server()
    workers = [
        context.Process(
            target=_run,
            args=(rank, num_ranks, port, (faults or {}).get(rank), str(log), function, arguments),
        )
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(TIMEOUT_SECONDS)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
        worker.join()
    return codes


def _run(
    rank: int,
    num_ranks: int,
    port: int,
    fault: str | None,
    log: str,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    # A shell's background job ignores it, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if num_ranks > 1:
        become_rank(rank, num_ranks, port)
    if fault is not None:
        os.environ[FAULT_VARIABLE] = fault
        _add_places()
    try:
        function(*arguments)
    finally:
        sys.stderr.flush()


def _hit_before(owner: Any, function: str, place: str) -> None:
    """Put a fault point before a function."""
    inner = getattr(owner, function)

    def hit(*arguments: Any, **options: Any) -> Any:
        fault_point(place)
        return inner(*arguments, **options)

    setattr(owner, function, hit)


def _add_places() -> None:
    """Put fault points into the middle of a rollout and of an update."""
    step_slots = slots.step_slots

    def decode(*arguments: Any) -> Any:
        fault_point("decode")
        return step_slots(*arguments)

    slots.step_slots = decode
    _hit_before(collection, "score_with_networks", "score")
    _hit_before(shared_mean, "_average_blocks", "sum")
    _hit_before(Strategy, "save_checkpoint", "save")
    register_optimizer_step_pre_hook(lambda *_: fault_point("step"))
