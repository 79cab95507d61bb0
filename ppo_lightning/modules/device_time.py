"""How long the device has computed: what is left of a stage's time, it was idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

SAMPLE_SECONDS = 0.25
"""Between two looks at a GPU."""


def busy_seconds(device: torch.device) -> float | None:
    """Seconds for which the device has computed since some start; None where nobody can say.

    On a CPU that is the processor time of this process by the number of threads that torch uses:
    with four threads, a second in which one of them computes counts a quarter. Processes of its
    own (loaders, a reward server) do not count. On a GPU see ``Utilisation``.
    """
    if device.type == "cpu":
        return time.process_time() / torch.get_num_threads()
    return _gpu(device.index or 0).busy() if device.type == "cuda" else None


class Utilisation:
    """Adds up what the driver says of a GPU's last moments, by a thread that asks it often.

    The driver's number is the share of its last window (a sixth of a second to a second) in which
    any kernel of any process ran, however few of the cores it used. So stages of less than some
    seconds are blurred, and an idle share of 0 does not mean that the GPU is used well.

    Args:
        read: Per cent; raises where it cannot be read, and then nothing is said.
        seconds: Between two looks.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        read: Callable[[], float],
        *,
        seconds: float = SAMPLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._seconds, self._clock = read, seconds, clock
        self._total: float | None = 0.0
        self._at = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilisation", daemon=True)

    def start(self) -> Utilisation:
        """Begin to ask."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask no more."""
        self._ended.set()
        self._thread.join()

    def busy(self) -> float | None:
        """Seconds so far; None if they cannot be read."""
        return self._total

    def sample(self) -> None:
        """Ask once."""
        try:
            share = self._read() / 100
        except Exception:  # no NVML, or a GPU that it does not know
            self._total = None
            self._ended.set()
            return
        now = self._clock()
        if self._total is not None:
            self._total += share * (now - self._at)
        self._at = now

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self.sample()


_gpus: dict[int, Utilisation] = {}


def _gpu(index: int) -> Utilisation:
    if index not in _gpus:
        _gpus[index] = Utilisation(lambda: float(torch.cuda.utilization(index))).start()
    return _gpus[index]


def idle_share(busy: float, seconds: float) -> float:
    """Share of ``seconds`` in which the device did not compute, in [0, 1]."""
    return min(1.0, max(0.0, 1 - busy / seconds)) if seconds > 0 else 0.0
