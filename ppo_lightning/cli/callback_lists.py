"""Callbacks of several config files: a later one takes the place of its like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppo_lightning.callbacks import CheckpointRollback, Watchdog
from ppo_lightning.callbacks.controller import Steering

_PACKAGE = __name__.partition(".")[0]


def settle(given: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Keep the last of callbacks that cannot be there twice, at the place of the first.

    Files are put together before anything is built, so the later in the list is of the later file.

    Args:
        given: Callbacks of all config files, in order.

    Returns:
        Those to use, and a line on each that was replaced.
    """
    kept: list[Any] = []
    replaced: list[str] = []
    for callback in given:
        place = next((n for n, other in enumerate(kept) if _stands_for(callback, other)), None)
        if place is None:
            kept.append(callback)
        else:
            kept[place] = callback
            replaced.append(
                f"`trainer.callbacks`: {type(callback).__name__} is there twice; the later one is "
                "used, with its own settings and defaults."
            )
    return kept, replaced


def _stands_for(callback: Any, other: Any) -> bool:
    """Whether two are of one class of this package and do the same thing.

    Classes of users are left to what they do about it themselves.
    """
    kind = type(callback)
    if kind is not type(other) or kind.__module__.partition(".")[0] != _PACKAGE:
        return False
    if isinstance(callback, Steering):
        return any(dial in other.steers for dial in callback.steers)
    return isinstance(callback, CheckpointRollback | Watchdog)
