"""Places at which a test lets the process be killed, as a crash or a scheduler would do it."""

from __future__ import annotations

import os
import signal
from collections import Counter

FAULT_VARIABLE = "PPO_LIGHTNING_FAULT"
"""``name:count`` or ``name:count:signal``: at the count-th passing of a place, and by which signal
(``KILL``, which nothing can catch, if none is named)."""

_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Do nothing, unless the environment asks for this process to be hit here.

    Args:
        name: Of the place.

    Raises:
        ValueError: The environment variable is malformed.
    """
    wanted = os.environ.get(FAULT_VARIABLE)
    if wanted is None:
        return
    place, count, number = _parse(wanted)
    if place != name:
        return
    _passed[name] += 1
    if _passed[name] == count:
        os.kill(os.getpid(), number)


def _parse(text: str) -> tuple[str, int, signal.Signals]:
    parts = text.split(":")
    kind = f"SIG{parts[2]}" if len(parts) == 3 else "SIGKILL"
    if len(parts) not in (2, 3) or not parts[1].isdigit() or kind not in signal.Signals.__members__:
        raise ValueError(f"`{FAULT_VARIABLE}` must be `name:count` or `name:count:TERM`: {text!r}.")
    return parts[0], int(parts[1]), signal.Signals[kind]
