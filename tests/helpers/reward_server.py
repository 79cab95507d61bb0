"""``ppo-lightning serve-reward`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.processes import TIMEOUT_SECONDS, server


class RewardProcess:
    """Starts the command and waits until it says where it listens.

    Args:
        arguments: Of the command.
        log: Gets what it writes to stderr.
        environment: Variables to set.
    """

    def __init__(
        self, *arguments: Any, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        context = server()
        receiver, sender = context.Pipe(duplex=False)
        self.log = log
        self.process = context.Process(
            target=_serve,
            args=(sender, str(log), dict(environment or {}), [str(a) for a in arguments]),
        )
        self.process.start()
        sender.close()
        with open(receiver.fileno(), encoding="utf-8", closefd=False) as output:
            self.said = output.readline()
        receiver.close()
        found = re.search(r"http://\S+/score", self.said)
        self.url = found[0] if found else ""

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def ended(self) -> int | None:
        """Wait for its end: the exit status, or the deadly signal as a negative number."""
        self.process.join(TIMEOUT_SECONDS)
        return self.process.exitcode


def _serve(sender: Any, log: str, environment: Mapping[str, str], arguments: list[str]) -> None:
    import torch

    from ppo_lightning.cli.main import main

    os.dup2(sender.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ |= environment
    code = main(["serve-reward", "--port", "0", *arguments])
    sys.stderr.flush()
    raise SystemExit(code)
