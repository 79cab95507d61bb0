"""Ranks tell each other what they do, through a store beside the process group.

The store is rank 0's, and answers from a thread of its own, also while rank 0 waits in a
collective. Where rank 0 is dead or stopped, nobody answers, which says that it is rank 0.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from ppo_lightning.distributed.beats import Beat, Seen, State
from ppo_lightning.distributed.processes import birth_of, is_gone, machine_name
from ppo_lightning.distributed.progress import Pulse
from ppo_lightning.distributed.progress import pulse as own_pulse

HURRIED_SECONDS = 0.05
"""Between two looks once something has happened."""
RANKS_PER_SECOND = 64
"""Beats that a rank reads in one second at most: with more ranks, each looks less often."""

_OPERATION = timedelta(seconds=5)
_CONNECT = timedelta(seconds=60)


def open_store(host: str, port: int | None) -> Any:
    """Open the store, or connect to it.

    Args:
        host: Name or address of rank 0's machine.
        port: Where it listens; None opens one, at a port that is free.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port or 0, is_master=port is None, wait_for_workers=False, timeout=_CONNECT
    )


class Heartbeat:
    """Says what this rank does, and keeps what the others have said. A thread does both.

    Args:
        store: Of ``open_store``; its other operations are left to this object.
        rank: This one's number.
        world_size: Number of ranks.
        interval: Seconds between two beats.
        pulse: What this process does.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        interval: float,
        pulse: Pulse = own_pulse,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.interval = interval * max(1.0, world_size / RANKS_PER_SECOND)
        self._store, self._pulse, self._clock = store, pulse, clock
        self._worker = threading.get_ident()
        self._said: tuple[State, str] = ("runs", "")
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._broken = self._hurried = False
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        pid = os.getpid()
        self._beat = Beat(
            rank=rank,
            machine=machine_name(),
            host=socket.gethostname(),
            pid=pid,
            birth=birth_of(pid),
        )

    def begin(self) -> None:
        """Say something for the first time; the others may only look once all have."""
        self._store.set_timeout(_OPERATION)
        self._tell()

    def start(self) -> None:
        """Go on saying it from a thread."""
        self._thread.start()

    def say(self, state: State, message: str = "") -> None:
        """Tell the others of an end; what was told first stays."""
        if self._said[0] == "runs" or (self._said[0] == "lost" and not self._said[1]):
            self._said = (state, message)
        self._hurry()

    def look(self) -> dict[int, Seen]:
        """Return what every rank has last said, this one too."""
        now, mine = self._clock(), self._now()
        seen = {self.rank: Seen(beat=mine)}
        for rank, (beat, at) in list(self._seen.items()):
            there = beat.machine == mine.machine
            gone = is_gone(beat.pid, beat.birth) if there else rank == 0 and self._broken
            seen[rank] = Seen(beat=beat, silent=now - at, gone=gone)
        return seen

    def wait_until(self, done: Callable[[dict[int, Seen]], Any], seconds: float) -> Any:
        """Look often until ``done`` says something, which is returned; None after a while."""
        deadline = self._clock() + seconds
        self._hurry()
        while True:
            answer = done(self.look())
            if answer or self._clock() > deadline:
                return answer or None
            time.sleep(HURRIED_SECONDS / 2)

    def stop(self) -> None:
        """Say the last word and end the thread; of rank 0 the store goes as well."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * self.interval + 2)
        self._store = None

    def _hurry(self) -> None:
        self._hurried = True
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._exchange()
            pause = min(HURRIED_SECONDS, self.interval) if self._hurried else self.interval
            self._wake.wait(pause)
            self._wake.clear()
        self._exchange()

    def _exchange(self) -> None:
        """Tell and read; a store that does not answer is noted."""
        if self._broken:
            return
        try:
            self._tell()
            others = [rank for rank in range(self.world_size) if rank != self.rank]
            texts = self._store.multi_get([_key(rank) for rank in others])
        except Exception as error:
            # A store that takes long belongs to a stopped process: it may answer later.
            self._broken = "imeout" not in type(error).__name__ + str(error)
            return
        now = self._clock()
        for beat in map(Beat.from_json, texts):
            before = self._seen.get(beat.rank)
            if before is None or before[0].number != beat.number:
                self._seen[beat.rank] = (beat, now)
            if beat.state in ("failed", "lost"):
                self._hurried = True

    def _tell(self) -> None:
        self._beat = replace(self._now(), number=self._beat.number + 1)
        self._store.set(_key(self.rank), self._beat.to_json())

    def _now(self) -> Beat:
        pulse, (state, message) = self._pulse, self._said
        idle = pulse.idle
        frame = sys._current_frames().get(self._worker) if idle > 2 * self.interval else None
        where, inside = place_in_code(frame)
        heard = tuple(r for r, (b, _) in list(self._seen.items()) if b.state in ("failed", "lost"))
        return replace(
            self._beat,
            state=state,
            stage=pulse.stage,
            iteration=pulse.iteration,
            step=pulse.step,
            idle=idle,
            waiting=pulse.is_waiting or inside,
            where=where,
            message=message,
            heard=heard,
        )


def place_in_code(frame: FrameType | None) -> tuple[str, bool]:
    """Line that a thread is in, outside of torch, and whether it waits for other ranks there.

    Args:
        frame: The innermost; None says nothing.
    """
    waits = False
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file:
            name = "/".join(file.split("/")[-2:])
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})", waits
        # In a backward pass under DDP the sum over ranks is made.
        waits |= "/torch/distributed/" in file or "_run_backward" in frame.f_code.co_name
        frame = frame.f_back
    return "", waits


def _key(rank: int) -> str:
    return f"beat/{rank}"


def all_heard(seen: dict[int, Seen], rank: int, patience: float) -> bool:
    """Whether every other rank knows of this one's end, or has come to its own.

    Args:
        seen: Of ``Heartbeat.look``.
        rank: This one.
        patience: Seconds of silence after which nobody is waited for.
    """
    others = [s for r, s in seen.items() if r != rank]
    return all(
        s.gone or s.silent > patience or s.beat.state != "runs" or rank in s.beat.heard
        for s in others
    )
