"""Arguments from a config's untyped dictionary: numbers reach the function as numbers."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ppo_lightning.errors import ConfigError, unknown_key_message

# What YAML 1.1 readers take for text, though everyone means a number: 1e-6, 5e-06, 1e6.
_SCIENTIFIC = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


def bind_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments against a function's signature, and make numbers of numbers given as text.

    Text in scientific notation becomes a float, at any depth. Where the parameter is annotated,
    the annotation decides: ``str`` keeps text, ``int`` and ``float`` take any text that is such a
    number and refuse the rest.

    Args:
        function: Who gets them.
        arguments: As the config has them.

    Raises:
        ConfigError: The function does not know an argument, or needs a number and gets none.
    """
    known = named_parameters(function)
    if not takes_anything(function):
        for key in arguments:
            if key not in known:
                where = f"`arguments` of the reward function `{function_name(function)}`"
                raise ConfigError(unknown_key_message(key, known, where))
    hints = _hints(function)
    return {key: _as_hinted(value, hints.get(key), key) for key, value in arguments.items()}


def named_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name.

    Raises:
        ConfigError: The function cannot be called by name alone, or hides its signature.
    """
    found = {}
    for name, parameter in _signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[name] = parameter
        elif parameter.kind == parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ConfigError(
                f"`function`: {function_name(function)} takes `{name}` by position only; a reward "
                "function is called by name."
            )
    return found


def takes_anything(function: Callable[..., Any]) -> bool:
    """Say whether the function has a ``**parameter``."""
    return any(p.kind == p.VAR_KEYWORD for p in _signature(function).parameters.values())


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return getattr(function, "__qualname__", type(function).__name__)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        name = function_name(function)
        raise ConfigError(
            f"`function`: Python cannot tell the parameters of {name}; wrap it in a `def`."
        ) from error


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}  # annotations that only a type checker can read


def _as_hinted(value: Any, hint: Any, key: str) -> Any:
    allowed = _members(hint)
    if isinstance(value, str) and str in allowed:
        return value
    if allowed & {int, float} and not allowed - {int, float, type(None)}:
        return _as_number(value, key, whole=float not in allowed)
    return _without_text_numbers(value)


def _members(hint: Any) -> set[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set(typing.get_args(hint))
    return {hint}


def _as_number(value: Any, key: str, *, whole: bool) -> Any:
    """Return text and floats as the number that the annotation asks for; others as they are."""
    if not isinstance(value, str | float):
        return value
    try:
        number = float(value)
    except ValueError as error:
        raise ConfigError(f"`arguments.{key}` must be a number, got {value!r}.") from error
    if not whole:
        return number
    if not number.is_integer():
        raise ConfigError(f"`arguments.{key}` must be a whole number, got {value!r}.")
    return int(number)


def _without_text_numbers(value: Any) -> Any:
    if isinstance(value, str):
        return float(value) if _SCIENTIFIC.fullmatch(value.strip()) else value
    if isinstance(value, Mapping):
        return {key: _without_text_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_text_numbers(entry) for entry in value)
    return value
