"""Checks that every config shares: one line that names the field, the value and the way out."""

from __future__ import annotations

import math


def require(condition: bool, message: str) -> None:
    """Raise a ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(name: str, value: float | None) -> None:
    """Refuse a value that is not a finite number above 0; None passes (the feature is off)."""
    require(
        value is None or (math.isfinite(value) and value > 0),
        f"`{name}` must be a finite number above 0, got {value}.",
    )


def require_at_least(name: str, value: float | None, low: float) -> None:
    """Refuse a value below ``low`` or not finite; None passes."""
    require(
        value is None or (math.isfinite(value) and value >= low),
        f"`{name}` must be at least {low}, got {value}.",
    )


def require_within(name: str, value: float | None, low: float, high: float) -> None:
    """Refuse a value outside [low, high]; None passes."""
    require(
        value is None or low <= value <= high,
        f"`{name}` must lie in [{low}, {high}], got {value}.",
    )
