"""A deadline for code that may wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from ppo_lightning.errors import RewardError

T = TypeVar("T")


def call_within(call: Callable[[], T], *, seconds: float, name: str) -> T:
    """Call something in a thread of its own, and wait for it so long and no longer.

    Python can stop no thread from outside. A signal could interrupt the main thread, but not one
    that is inside a library, and Lightning and the launchers have uses for signals; a process
    could be ended, but forking one beside torch's threads and CUDA is not safe. So the thread is
    left to itself, and is a daemon, which does not keep the process from ending.

    Grad mode, context variables and the CUDA device, which threads have each for themselves, are
    the caller's.

    Args:
        call: Takes no arguments.
        seconds: Most time that it may take.
        name: What to call it.

    Raises:
        RewardError: It has not come back in time.
        BaseException: Whatever ``call`` raises.
    """
    found: list[T] = []
    raised: list[BaseException] = []
    context, grad = copy_context(), torch.is_grad_enabled()
    cuda: Any = torch.cuda
    device = cuda.current_device() if cuda.is_initialized() else None

    def work() -> None:
        try:
            if device is not None:
                cuda.set_device(device)
            with torch.set_grad_enabled(grad):
                found.append(context.run(call))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise RewardError(
            f"{name} has not come back after `timeout: {seconds:g}` seconds; its thread cannot be "
            "stopped and goes on until the process ends. Raise `timeout`, or give what it waits "
            "for a limit of its own."
        )
    return found[0]
