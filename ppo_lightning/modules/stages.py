"""The stages of an iteration: timed, named in profiles, and told to every callback that listens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl

from ppo_lightning.distributed import pulse
from ppo_lightning.modules.device_time import busy_seconds

STAGES = ("rollout", "reward", "scoring", "update", "validation")


class StageClock:
    """Seconds spent in each stage since the last ``reset``.

    Attributes:
        seconds: By stage.
        busy: Seconds in which the device computed, by stage; empty where that is not known.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.busy: dict[str, float] = defaultdict(float)
        self._began, self._waited = time.perf_counter(), pulse.waited

    @property
    def elapsed(self) -> float:
        """Seconds since the last ``reset``."""
        return time.perf_counter() - self._began

    @property
    def waited(self) -> float:
        """Seconds since the last ``reset`` in which this rank waited for others."""
        return pulse.waited - self._waited

    @contextmanager
    def stage(self, module: pl.LightningModule, name: str) -> Iterator[None]:
        """Time a stage and call ``on_stage_start`` and ``on_stage_end`` of the callbacks.

        The Trainer's profiler knows it as ``[Stage]`` and its name.

        Args:
            module: The module that runs it.
            name: One of ``STAGES``.
        """
        with pulse.in_stage(name):
            call_listeners(module, "on_stage_start", name)
            start, busy = time.perf_counter(), busy_seconds(module.device)
            try:
                with profiled(module, name):
                    yield
            finally:
                self.seconds[name] += time.perf_counter() - start
                if busy is not None:
                    self.busy[name] += (busy_seconds(module.device) or busy) - busy
                call_listeners(module, "on_stage_end", name)

    def reset(self) -> None:
        """Begin a new iteration."""
        self.seconds.clear()
        self.busy.clear()
        self._began, self._waited = time.perf_counter(), pulse.waited


def profiled(module: pl.LightningModule, name: str) -> AbstractContextManager[Any]:
    """Name what is done inside to the Trainer's profiler, and to nobody else.

    Args:
        module: The module that does it.
        name: Of a stage, or with a dot of a part of one: ``update.backward``.
    """
    pulse.beat()
    profiler: Any = module.trainer.profiler  # type: ignore[attr-defined]
    named: AbstractContextManager[Any] = profiler.profile(f"[Stage]{name}")
    return named


def call_listeners(module: pl.LightningModule, hook: str, *arguments: Any) -> None:
    """Call a hook of this project on every callback that has it: ``hook(trainer, module, …)``."""
    trainer = module.trainer
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        listener = getattr(callback, hook, None)
        if listener is not None:
            listener(trainer, module, *arguments)


def is_treated(trainer: Any, illness: str) -> bool:
    """Whether a callback acts on an illness: one whose method ``treats`` says so."""
    listeners = (getattr(callback, "treats", None) for callback in trainer.callbacks)
    return any(treats(illness) for treats in listeners if treats is not None)
