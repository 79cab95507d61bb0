"""Checks that every config shares: one line that names the field, the value and the way out."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


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


def require_fields(config: Any) -> None:
    """Refuse None where a field's type has none, and a value that is none of a field's choices.

    In Python a misspelt choice would pass for another, and None for a feature that is off.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        require(value is not None or allows_none(hint), _not_none(field))
        choices = _choices(hint)
        require(
            not choices or value in choices,
            f"`{field.name}` must be one of {', '.join(map(str, choices))}, got {value!r}.",
        )


def allows_none(hint: Any) -> bool:
    """Whether None is a value of a type; of one that is not known it may be."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(allows_none(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return None in get_args(hint)
    return hint in (None, Any, object, types.NoneType) or isinstance(hint, TypeVar | str)


def _not_none(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    remedy = "give a value" if default is dataclasses.MISSING else "leave it out for the default"
    known = "" if default is dataclasses.MISSING else f", {default!r}"
    return f"`{field.name}` must not be None (`null` in YAML): {remedy}{known}."


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return all values that a hint allows, or none where it allows more than can be listed."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) not in (Union, types.UnionType):
        return (None,) if hint is type(None) else ()
    parts = [(True, False) if part is bool else _choices(part) for part in get_args(hint)]
    return tuple(choice for part in parts for choice in part) if all(parts) else ()
