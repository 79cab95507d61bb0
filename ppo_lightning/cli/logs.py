"""What the package has to say beside its results, on the command line: a line each on stderr."""

from __future__ import annotations

import logging
import os
import sys

from typing_extensions import override

_FIRST = ("", "0")


class LinesToStderr(logging.Handler):
    """Prints what is logged; of several processes that Lightning starts, the first one does.

    To ``sys.stderr`` as it is at that moment, which a notebook or a test may have replaced.
    """

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or os.environ.get("LOCAL_RANK", "") in _FIRST:
            print(f"ppo-lightning: {record.getMessage()}", file=sys.stderr)


def show_log() -> None:
    """Let this package's log be seen, from ``INFO`` on; may be called again."""
    log = logging.getLogger("ppo_lightning")
    if not any(isinstance(handler, LinesToStderr) for handler in log.handlers):
        log.addHandler(LinesToStderr())
    log.setLevel(logging.INFO)
