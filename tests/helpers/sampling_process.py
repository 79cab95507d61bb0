"""Engines that misbehave in the process that samples, and a quick way to start it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ppo_lightning.rollout import NativeEngine, RolloutEngine
from ppo_lightning.rollout.engines import async_process
from ppo_lightning.types import PromptBatch, Rollout
from tests.helpers.processes import server


def fork_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork them from a server that has imported everything, instead of starting Python anew."""
    server()
    monkeypatch.setattr(async_process, "START_METHOD", "forkserver")


class Faulty(RolloutEngine):
    """Does something bad at its n-th buffer outside the process that made it.

    Args:
        what: Name of a signal that it sends itself, or ``raise``.
        at: Which buffer, from 1.
    """

    def __init__(self, what: str, at: int) -> None:
        self.what, self.at, self.home, self.count = what, at, os.getpid(), 0
        self._inner = NativeEngine()

    def generate(self, model: Any, prompts: PromptBatch, **settings: Any) -> Rollout:
        self.count += os.getpid() != self.home
        if self.count == self.at:
            if self.what == "raise":
                raise RuntimeError("the cache is full\nof something")
            os.kill(os.getpid(), signal.Signals[self.what])
        return self._inner.generate(model, prompts, **settings)


def lives(pid: int) -> bool:
    """Whether a process is there and more than a corpse that nobody has fetched."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
