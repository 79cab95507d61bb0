"""The process that samples: it has an actor of its own, and lives as long as its trainer.

It ends when the connection to the trainer does, whatever became of that, and nothing else ends it
in good order: signals that a whole group of processes gets are the trainer's business.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.errors import RolloutError, first_line
from ppo_lightning.models import build_policy
from ppo_lightning.rollout.engines.base import RolloutEngine, StopRules
from ppo_lightning.rollout.engines.shared_weights import SharedWeights
from ppo_lightning.types import PromptBatch

_LOOK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker begins with.

    Args:
        trainer: Number of the trainer's process.
        policy: How the actor is loaded.
        engine: Samples, in here.
        device: Where.
        dtypes: Of all weights and buffers of the trainer's actor, by name.
        weights: Memory through which those that are trained come.
        threads: Of torch, as in the trainer.
        matmul_precision: Of float32, as in the trainer.
        environment: The trainer's.
    """

    trainer: int
    policy: PolicyConfig
    engine: RolloutEngine
    device: str
    dtypes: dict[str, torch.dtype]
    weights: SharedWeights
    threads: int
    matmul_precision: str
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the trainer asks for.

    Args:
        prompts: On the CPU.
        sampling: Settings; the temperature is that of this task.
        stops: None takes those of the task before.
        policy_version: Of the weights in the shared memory.
        autocast: Dtype of the trainer's autocast, or None.
    """

    prompts: PromptBatch
    sampling: SamplingConfig
    stops: StopRules | None
    policy_version: int
    autocast: torch.dtype | None


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return what an update changes, by name: all weights, or with adapters the adapters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def all_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of weights and buffers by name."""
    return {name: t.dtype for name, t in chain(model.named_parameters(), model.named_buffers())}


def serve(connection: Any, settings: WorkerSettings) -> None:
    """Answer tasks until the connection ends; messages are ``(what, content)``, pickled."""
    _live_with(settings.trainer)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    try:
        worker = _Worker(settings)
        _tell(connection, "ready", os.getpid())
        while True:
            worker.answer(connection, pickle.loads(tasks.get()))
    except (BrokenPipeError, ConnectionError):
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _tell(connection, "failed", f"{type(error).__name__}: {first_line(error)}")


def _live_with(trainer: int) -> None:
    """End with the trainer, and not before."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux" and os.getppid() == trainer:
        # Also where it is stopped, and no thread of it can see the connection end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != trainer:
            os._exit(0)


def _listen(connection: Any, tasks: queue.SimpleQueue[bytes]) -> None:
    """Hand tasks on, and end the process with the connection, whatever it is doing."""
    parent = os.getppid()
    try:
        while os.getppid() == parent:
            if connection.poll(_LOOK_SECONDS):
                tasks.put(connection.recv_bytes())
    except (EOFError, OSError):
        pass
    os._exit(0)


def _tell(connection: Any, what: str, content: Any) -> None:
    connection.send_bytes(pickle.dumps((what, content)))


class _Worker:
    """The actor, and what samples from it."""

    def __init__(self, settings: WorkerSettings) -> None:
        os.environ |= settings.environment
        torch.set_num_threads(settings.threads)
        torch.set_float32_matmul_precision(settings.matmul_precision)
        self.settings, self.device = settings, torch.device(settings.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = build_policy(settings.policy).to(self.device)
        for name, tensor in chain(self.model.named_parameters(), self.model.named_buffers()):
            tensor.data = tensor.data.to(settings.dtypes.get(name, tensor.dtype))
        self.stops: StopRules | None = None

    def answer(self, connection: Any, task: Task) -> None:
        """Take the weights, say so, and sample."""
        self.settings.weights.read_into(trained_weights(self.model))
        _tell(connection, "taken", task.policy_version)
        self.stops = task.stops or self.stops
        if self.stops is None:
            raise RolloutError("the first task came without end tokens.")
        with torch.no_grad(), self._autocast(task.autocast):
            rollout = self.settings.engine.generate(
                self.model,
                task.prompts.to(self.device),
                sampling=task.sampling,
                stops=self.stops,
                policy_version=task.policy_version,
            )
        names = ("response_ids", "response_mask", "sampler_logprobs", "truncated")
        columns = {name: getattr(rollout, name).cpu().numpy() for name in names}
        _tell(connection, "rollout", (rollout.policy_version, rollout.temperature, columns))

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
