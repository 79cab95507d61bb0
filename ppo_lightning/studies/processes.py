"""Runs as processes of their own: started, stopped, and what their last words were."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import yaml

from ppo_lightning.checkpointing import newest_good
from ppo_lightning.io import write_text_atomic
from ppo_lightning.studies.runs import Outcome, Run, write_state

LOG_FILE = "run.log"
CONFIG_FILE = "fit.yaml"
"""The config that a run is started with; ``fit`` writes its own ``config.yaml`` beside it."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OWN_ERROR = "ppo-lightning: "
_FEW_LINES = 3  # further up, it is a notice about something else
_LONGEST_ERROR = 300
_TAIL_BYTES = 65_536


class FitProcesses:
    """Make each run by a process ``ppo-lightning fit`` of its own.

    What it prints goes to ``run.log`` in the run's folder. A process is stopped by SIGTERM, after
    which ``fit`` ends at the next place where it can; all that it has started goes with it.

    Args:
        keep_open: Open files that the processes inherit.
        threads: For each process, where the environment does not say; None leaves it to torch.
        grace: Seconds from SIGTERM to SIGKILL.
        command: Of ``ppo-lightning``.
    """

    def __init__(
        self,
        *,
        keep_open: Sequence[int] = (),
        threads: int | None = None,
        grace: float = 60.0,
        command: Sequence[str] = (sys.executable, "-m", "ppo_lightning.cli.main"),
    ) -> None:
        self.keep_open, self.threads, self.grace = tuple(keep_open), threads, grace
        self.command = tuple(command)
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def __call__(self, run: Run, *, again: bool) -> Outcome:
        """Make a run; see ``Runner``."""
        arguments = self._arguments(run, again=again)
        path = run.folder / LOG_FILE
        with open(path, "ab") as log:
            begin = log.tell()
            process = self._start(arguments, log.fileno())
            if process is None:
                return Outcome(status="stopped")
            write_state(run.folder, pid=process.pid)
            try:
                code = process.wait()
            finally:
                with self._lock:
                    self._alive.discard(process)
            if code < 0:
                _end_group(process.pid)
        if code == 0:
            return Outcome(status="finished")
        if self._stopping:
            return Outcome(status="stopped")
        return Outcome(status="failed", error=_why(code, path, begin))

    def stop(self) -> None:
        """Let runs end as soon as they can, and start no others."""
        with self._lock:
            self._stopping = True
            alive = list(self._alive)
        for process in alive:
            _signal(process, signal.SIGTERM)
        timer = threading.Timer(self.grace, self.kill)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        """End runs at once."""
        with self._lock:
            self._stopping = True
            alive = list(self._alive)
        for process in alive:
            _signal(process, signal.SIGKILL)

    def _arguments(self, run: Run, *, again: bool) -> list[str]:
        config = run.folder / CONFIG_FILE
        text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
        write_text_atomic(config, text)
        arguments = [*self.command, "fit", "--config", str(config)]
        last = newest_good([run.folder]).path if again else None
        return [*arguments, *(() if last is None else ("--ckpt_path", str(last)))]

    def _start(self, arguments: Sequence[str], output: int) -> subprocess.Popen[bytes] | None:
        environment = dict(os.environ)
        if self.threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        with self._lock:
            if self._stopping:
                return None
            # A session of its own: Ctrl-C on the terminal reaches the sweep alone, which then
            # stops the runs one way, with all that they have started.
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=self.keep_open,
            )
            self._alive.add(process)
            return process


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return


def _end_group(leader: int) -> None:
    """End what a killed process has started: other ranks would wait for it, and keep a device."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _why(code: int, log: Path, begin: int) -> str:
    """Say in one line why a process failed."""
    last = last_error(log, begin)
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}" + (f"; its last line: {last}" if last else "")
    return last or f"exit code {code}, without a word"


def last_error(log: Path, begin: int = 0) -> str:
    """Return the last line of an error in a log, without colours and overwritten progress.

    This project's own errors may be followed by a line on where to look: theirs is the one that
    names the program.

    Args:
        log: What a process has printed.
        begin: Where the last attempt begins, in bytes.
    """
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(begin, end - _TAIL_BYTES))
        text = _ESCAPES.sub("", file.read().decode("utf-8", errors="replace"))
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    own = [line for line in lines[-_FEW_LINES:] if line.startswith(_OWN_ERROR)]
    chosen = own[-1].removeprefix(_OWN_ERROR) if own else (lines[-1] if lines else "")
    return chosen if len(chosen) <= _LONGEST_ERROR else f"{chosen[: _LONGEST_ERROR - 1]}…"
