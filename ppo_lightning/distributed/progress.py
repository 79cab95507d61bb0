"""What this process is doing: told by the thread that works, read by the one that tells others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START = "start"
"""Before the first stage: models are loaded, as long as that may take."""
BETWEEN = "between stages"
"""In callbacks, loggers, the Trainer itself."""


class Pulse:
    """Stage, place and progress of this process. Writing costs well under a microsecond.

    Every attribute is set by one assignment, so another thread may read at any time.

    Args:
        clock: Seconds, from any start.

    Attributes:
        stage: Name of what is done now.
        iteration: Number of the iteration or epoch.
        step: Step of it.
        is_waiting: Whether other ranks are waited for, as far as this package knows.
        waited: Seconds spent so since the process began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.stage, self.iteration, self.step = START, 0, 0
        self.is_waiting, self.waited = False, 0.0
        self._moved_at = clock()

    def beat(self) -> None:
        """Say that something was done: a token, a text, a microbatch."""
        self._moved_at = self._clock()

    @property
    def idle(self) -> float:
        """Seconds since something was done."""
        return self._clock() - self._moved_at

    def enter(self, stage: str) -> None:
        """Go on to another stage."""
        self.stage = stage
        self.beat()

    @contextmanager
    def in_stage(self, name: str) -> Iterator[None]:
        """Be in a stage, and then in the one before again."""
        before = self.stage
        self.enter(name)
        try:
            yield
        except BaseException:
            self.beat()  # but it stays the stage that failed
            raise
        self.enter(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks."""
        began, self.is_waiting = self._clock(), True
        try:
            yield
        finally:
            self.waited += self._clock() - began
            self.is_waiting = False
            self.beat()


pulse = Pulse()
"""Of this process."""
