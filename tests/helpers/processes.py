"""Ranks as processes of one gloo group, forked from a server that imports once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

# What a run imports late is here as well: otherwise every process would import it for itself.
_PRELOAD = [
    "torch",
    "torch.profiler",
    "lightning.pytorch",
    "transformers",
    "transformers.processing_utils",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "pytest",
    "deepspeed",
    "ppo_lightning.callbacks",
    "ppo_lightning.modules",
    "tests.helpers.everything",
    "tests.helpers.sft_runs",
    "tests.helpers.frozen",
]
TIMEOUT_SECONDS = 120


def server() -> ForkServerContext:
    """The server that has imported everything; processes are forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def run_on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Call ``function(*arguments)`` in ``num_ranks`` processes that find torchrun's environment.

    Args:
        function: Of a test module's top level; its result must be picklable.
        num_ranks: Processes.
        arguments: Handed to each.

    Returns:
        Results by rank.

    Raises:
        AssertionError: A rank raised (its traceback is the message) or did not end.
    """
    context = server()
    port, queue = free_port(), context.Queue()
    workers = [
        context.Process(target=_rank, args=(queue, rank, num_ranks, port, function, arguments))
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        answers = [queue.get(timeout=TIMEOUT_SECONDS) for _ in workers]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    failures = [text for _, failed, text in answers if failed]
    assert not failures, "\n".join(failures)
    return [result for _, _, result in sorted(answers, key=lambda answer: answer[0])]


def _rank(
    queue: Any,
    rank: int,
    num_ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    become_rank(rank, num_ranks, port)
    try:
        queue.put((rank, False, function(*arguments)))
    except BaseException:
        queue.put((rank, True, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def become_rank(rank: int, num_ranks: int, port: int) -> None:
    """Give this process torchrun's environment and one thread."""
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
