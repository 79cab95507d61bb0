"""Computing in the dtypes that tensors have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Turn autocast off for a block, where it is on: entering the context alone takes its time.

    Args:
        device_type: Of the tensors, as ``"cuda"``.
    """
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
