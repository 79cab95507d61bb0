"""Checks that every config shares: one line that names the field, the value and the way out."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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


def require_choices(config: Any) -> None:
    """Refuse a value of a ``Literal`` field that is none of its choices.

    A config file is checked by its parser; in Python a misspelt choice would pass for another.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        choices = _choices(hints[field.name])
        value = getattr(config, field.name)
        require(
            not choices or value in choices,
            f"`{field.name}` must be one of {', '.join(map(str, choices))}, got {value!r}.",
        )


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return all values that a hint allows, or none where it allows more than can be listed."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, types.UnionType):
        return (None,) if hint is type(None) else ()
    parts = [_choices(part) for part in get_args(hint)]
    return tuple(choice for part in parts for choice in part) if all(parts) else ()
