"""The trainer's end of the process that samples: every wait has a limit, every end a message."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import time
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ppo_lightning.distributed import pulse
from ppo_lightning.errors import RewardError, RolloutError
from ppo_lightning.rewards.deadline import call_within
from ppo_lightning.rollout.engines.async_worker import WorkerSettings, serve

START_METHOD = "spawn"
"""A child of the trainer itself, which the system ends with it; no CUDA context is inherited."""

BEAT_SECONDS = 1.0
"""Between two beats of a trainer that waits."""

_WAY_OUT = (
    "Its own messages, above, say more. Checkpoints are whole, and `--ckpt_path last` goes on from "
    "the newest."
)


class AsyncProcess:
    """A process that samples; after a failure it is ended, and asked nothing any more.

    Args:
        settings: What it begins with.
        timeout: Most seconds to wait for anything.

    Raises:
        RolloutError: It does not start.
    """

    def __init__(self, settings: WorkerSettings, *, timeout: float) -> None:
        self._timeout, self._owner = timeout, os.getpid()
        self._failure: str | None = None
        context: Any = multiprocessing.get_context(START_METHOD)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, settings), name="ppo-lightning sampler", daemon=True
        )
        # Before multiprocessing's own, which would wait for a process that is stopped.
        atexit.register(self.end)
        try:
            self._process.start()
        except Exception as error:
            self.end()
            raise RolloutError(
                f"the process that samples could not be started: {error}. What an engine is made "
                "of must be picklable, so its class must stand in a file that can be imported."
            ) from error
        theirs.close()
        self.pid: int = self.wait("ready", "starting")

    def send(self, message: Any, doing: str) -> None:
        """Send something, of any size.

        Raises:
            RolloutError: It was not taken.
        """
        content = pickle.dumps(message)
        self._limited(lambda: self._connection.send_bytes(content), self._timeout, doing)

    def wait(self, what: str, doing: str) -> Any:
        """Wait for a message of a kind.

        Args:
            what: The kind.
            doing: What the process is doing meanwhile, for messages.

        Raises:
            RolloutError: Nothing came in time, the process has ended, or it says that it failed.
        """
        if self._failure is not None:
            raise RolloutError(self._failure)
        end = time.monotonic() + self._timeout
        ready = self._ready(end)
        if not ready:
            raise self._failed(f"{self._hang()} while {doing}")
        if self._connection not in ready:
            raise self._failed(f"ended while {doing}: {self._exit()}")
        left = max(end - time.monotonic(), 1.0)
        found, content = pickle.loads(self._limited(self._connection.recv_bytes, left, doing))
        if found == "failed":
            raise self._failed(f"failed while {doing}: {str(content).rstrip('.')}")
        if found != what:
            raise self._failed(f"said `{found}` instead of `{what}` while {doing}")
        return content

    def _ready(self, end: float) -> list[Any]:
        """Wait until it says something or ends.

        That counts as progress: the wait has a limit of its own, and the tokens of a large buffer,
        which take long, come one after the other where the watchdog of the ranks cannot see them.
        """
        sources = [self._connection, self._process.sentinel]
        while True:
            left = end - time.monotonic()
            ready = connection.wait(sources, min(max(left, 0.0), BEAT_SECONDS))
            pulse.beat()
            if ready or left <= 0:
                return ready

    def end(self) -> None:
        """End it, whatever it is doing: it holds nothing that is not here too."""
        if os.getpid() != self._owner:  # forked off, and not the one that started it
            return
        atexit.unregister(self.end)
        if self._process.pid is not None:
            self._process.kill()
            self._process.join(5)
        self._connection.close()

    def _limited(self, call: Any, seconds: float, doing: str) -> Any:
        """Call something that may wait for the other end."""
        if self._failure is not None:
            raise RolloutError(self._failure)
        try:
            return call_within(call, seconds=seconds, name="the process that samples")
        except RewardError as error:  # the deadline's own
            raise self._failed(f"{self._hang()} while {doing}") from error
        except (EOFError, OSError) as error:
            raise self._failed(f"ended while {doing}: {self._exit()}") from error

    def _hang(self) -> str:
        stopped = " (it is stopped, as by SIGSTOP)" if _is_stopped(self._process.pid) else ""
        return f"has not answered for `timeout: {self._timeout:g}` seconds{stopped}"

    def _exit(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        if code is None or code >= 0:
            hint = (
                '; a script that starts a run does so under `if __name__ == "__main__":`'
                if code == 1
                else ""
            )
            return f"exit status {code}{hint}"
        name = signal.Signals(-code).name
        killed = ", as when the memory of the machine runs out" if -code == signal.SIGKILL else ""
        return f"killed by {name}{killed}"

    def _failed(self, reason: str) -> RolloutError:
        self._failure = f"the process that samples {reason}. {_WAY_OUT}"
        self.end()
        return RolloutError(self._failure)


def _is_stopped(pid: int | None) -> bool:
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return status.rpartition(")")[2].split()[0] in ("T", "t")
    return False
