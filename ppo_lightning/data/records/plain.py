"""Values of tables and arrays as plain Python, and what counts as no value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return the value without types of array libraries, at any depth.

    Numbers and arrays of NumPy (and tensors) become numbers and lists, which JSON, checkpoints
    and reward functions can take; tuples become lists; everything else is left as it is.
    """
    if hasattr(value, "tolist"):  # first: `numpy.float64` is a float too, and prints otherwise
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def is_null(value: Any) -> bool:
    """Whether there is no value: None, or the NaN that tables of numbers have in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def null_mark(value: Any) -> str:
    """Return what follows a key's name in a message: nothing, or that its value is null."""
    if value is None:
        return " (null)"
    return " (NaN)" if is_null(value) else ""
