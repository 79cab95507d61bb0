"""The progress bars of transformers, kept for what takes time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_bars() -> Iterator[None]:
    """Draw no bar over weights that are read from or written to the disk, a matter of seconds.

    A download keeps its bar: do not use it around one.
    """
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]
