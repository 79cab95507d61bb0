"""Sampling in a process of its own, one update ahead of the training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.configs.checks import require, require_positive
from ppo_lightning.distributed import rank
from ppo_lightning.errors import ConfigError, RolloutError
from ppo_lightning.rollout.engines.async_process import AsyncProcess
from ppo_lightning.rollout.engines.async_worker import (
    Task,
    WorkerSettings,
    all_dtypes,
    trained_weights,
)
from ppo_lightning.rollout.engines.background import BackgroundEngine
from ppo_lightning.rollout.engines.base import RolloutEngine, StopRules
from ppo_lightning.rollout.engines.native import NativeEngine
from ppo_lightning.rollout.engines.shared_weights import SharedWeights
from ppo_lightning.rollout.engines.vllm import VLLMEngine
from ppo_lightning.types import PromptBatch, Rollout


class AsyncEngine(BackgroundEngine):
    """Sample the next buffer in another process while this one is trained on.

    The process has a copy of the actor. Before each task it is sent the weights that are trained
    (with adapters, those alone), and says when it has them; so every response is of one version,
    one update older than the weights that learn from it. ``staleness`` says what that means for
    them. Held-out prompts are answered in the trainer's process, by the current weights.

    With several ranks each has such a process.

    Args:
        engine: Samples, in the other process; None takes the native decode loop.
        device: Of the other process, such as ``cuda:1``; a list has one for each rank on this
            machine. None is the trainer's own.
        ahead: 1 samples the next buffer during the update; 0 waits for the current weights, so that
            nothing is ever stale.
        timeout: Most seconds that the trainer waits for the process, to start, to take weights or
            to finish a buffer. Then the run ends.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        *,
        device: str | list[str] | None = None,
        ahead: int = 1,
        timeout: float = 600.0,
    ) -> None:
        require(ahead in (0, 1), f"`ahead` of AsyncEngine must be 0 or 1, got {ahead}.")
        require_positive("timeout", timeout)
        self.engine = engine or NativeEngine()
        if isinstance(self.engine, BackgroundEngine | VLLMEngine):
            raise ConfigError(
                f"`engine` of AsyncEngine is a {type(self.engine).__name__}, which samples outside "
                "the trainer's process already: take one that samples in it."
            )
        self.device, self.ahead, self.timeout = device, ahead, timeout
        self.bytes_pushed = 0
        self._policy: PolicyConfig | None = None
        self._forget()

    def _forget(self) -> None:
        self._process: AsyncProcess | None = None
        self._weights: SharedWeights | None = None
        self._told: tuple[object, ...] | None = None
        self._prompts: PromptBatch | None = None

    @property
    @override
    def dtype(self) -> torch.dtype | None:  # type: ignore[override]
        return self.engine.dtype

    @override
    def prepare(self, policy: PolicyConfig) -> None:
        self._policy = policy

    @override
    def check(self, model: nn.Module) -> None:
        self.engine.check(model)

    @override
    def temperatures(self, sampling: SamplingConfig) -> tuple[float, float]:
        return self.engine.temperatures(sampling)

    @override
    def generate(self, model: nn.Module, prompts: PromptBatch, **settings: Any) -> Rollout:
        """Answer here and now, with the weights in hand."""
        return self.engine.generate(model, prompts, **settings)

    @override
    def begin(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        policy_version: int,
    ) -> None:
        if self._prompts is not None:
            raise RolloutError("a buffer is being sampled already: it must be taken first.")
        process = self._started(model, prompts.prompt_ids.device)
        assert self._weights is not None
        self.bytes_pushed += self._weights.write(trained_weights(model))
        known = (stops.end_ids, stops.pad_id, id(stops.decoder))
        kind = prompts.prompt_ids.device.type
        task = Task(
            prompts=prompts.to("cpu"),
            sampling=sampling,
            stops=None if known == self._told else stops,
            policy_version=policy_version,
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        )
        process.send(task, "taking the weights")
        # A barrier: the update may not touch the shared memory before it was read.
        taken = process.wait("taken", "taking the weights")
        if taken != policy_version:
            raise RolloutError(f"weights of version {policy_version} were sent, {taken} taken.")
        self._told, self._prompts = known, prompts

    @override
    def finish(self) -> Rollout:
        if self._prompts is None or self._process is None:
            raise RolloutError("nothing is being sampled.")
        prompts, self._prompts = self._prompts, None
        version, temperature, columns = self._process.wait("rollout", "sampling")
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        return Rollout(
            prompts=prompts.to("cpu"), policy_version=version, temperature=temperature, **tensors
        )

    @override
    def close(self) -> None:
        """End the process; the next task starts another one."""
        if self._process is not None:
            self._process.end()
        if self._weights is not None:
            self._weights.close()
        self._forget()

    @property
    def pid(self) -> int | None:
        """Number of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def _started(self, model: nn.Module, device: torch.device) -> AsyncProcess:
        if self._process is not None:
            return self._process
        if self._policy is None:
            raise RolloutError("AsyncEngine loads the actor itself: call `prepare` first.")
        self._weights = SharedWeights(trained_weights(model))
        settings = WorkerSettings(
            trainer=os.getpid(),
            policy=self._policy,
            engine=self.engine,
            device=_own(self.device, device),
            dtypes=all_dtypes(model),
            weights=self._weights,
            threads=torch.get_num_threads(),
            matmul_precision=torch.get_float32_matmul_precision(),
            environment=dict(os.environ),
        )
        self._process = AsyncProcess(settings, timeout=self.timeout)
        return self._process


def _own(device: str | Sequence[str] | None, trainers: torch.device) -> str:
    """Choose the device of this rank's process.

    Raises:
        ConfigError: There are fewer devices than ranks on this machine.
    """
    if device is None or isinstance(device, str):
        return str(trainers) if device is None else device
    number = int(os.environ.get("LOCAL_RANK", rank()))
    if number >= len(device):
        raise ConfigError(
            f"`device` of AsyncEngine has {len(device)} entries, and this is rank {number} of its "
            "machine: list a device for each."
        )
    return device[number]
