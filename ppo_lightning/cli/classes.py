"""What a class that a config names takes as arguments, and which class may have been meant."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ppo_lightning.errors import nearest

_ROOMS = (
    "ppo_lightning.modules",
    "ppo_lightning.rewards",
    "ppo_lightning.rollout",
    "ppo_lightning.data",
    "ppo_lightning.callbacks",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.profilers",
)


def resolve(path: str) -> Any:
    """Return what an import path names, or None if there is no such thing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def argument_names(owner: str, keys: Sequence[str] = ()) -> list[str]:
    """List what a class takes, or a config section inside its arguments.

    Args:
        owner: Import path of the class.
        keys: Names of arguments, each inside the one before, that are config sections.

    Returns:
        In the order of the signature; empty where that cannot be told.
    """
    part = resolve(owner)
    for key in keys:
        part = _section(part, key)
    if is_dataclass(part):
        return [field.name for field in fields(part)]
    if not isinstance(part, type):
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(part).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def takes_more(owner: str) -> bool:
    """Whether a class has a ``**parameter``, so that ``argument_names`` may not be all it takes."""
    part = resolve(owner)
    parameters = inspect.signature(part).parameters.values() if isinstance(part, type) else ()
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)


def argument_types(owner: Any) -> dict[str, Any]:
    """Return the annotations of a class's arguments; empty where they cannot be read."""
    try:
        return get_type_hints(owner if is_dataclass(owner) else owner.__init__)
    except (NameError, TypeError, AttributeError):
        return {}


def section_class(annotation: Any) -> type | None:
    """Return the dataclass in an annotation, which may be optional; None if there is none."""
    found = [o for o in _options(annotation) if isinstance(o, type) and is_dataclass(o)]
    return found[0] if len(found) == 1 else None


def is_section(annotation: Any) -> bool:
    """Whether an annotation is a dataclass, or one or None: what is written as a config section."""
    kind = section_class(annotation)
    return kind is not None and {*_options(annotation)} <= {kind, NoneType}


def nearest_class(path: str) -> str | None:
    """Return the import path of the class that was probably meant."""
    module, _, name = path.rpartition(".")
    for room in [module] if module else _ROOMS:
        if room not in sys.modules and not module:
            continue
        near = nearest(name, _class_names(room))
        if near is not None:
            return f"{room}.{near}"
    return None


def full_key(steps: Sequence[str]) -> str:
    """Join the steps of a problem as a config has them: arguments of a class lie in ``init_args``.

    Args:
        steps: Keys, and ``class:PATH`` where the arguments of a class begin.
    """
    keys: list[str] = []
    for step in steps:
        path = step.removeprefix("class:")
        if path == step:
            keys.append(step)
        elif not is_dataclass(resolve(path)):
            keys.append("init_args")
    return ".".join(keys)


def _options(annotation: Any) -> Sequence[Any]:
    """Return the alternatives of a union, or the one thing that it is."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _section(owner: Any, key: str) -> type | None:
    return None if owner is None else section_class(argument_types(owner).get(key))


def _class_names(room: str) -> list[str]:
    try:
        module = import_module(room)
    except ImportError:
        return []
    names = getattr(module, "__all__", None) or vars(module)
    return [name for name in names if inspect.isclass(getattr(module, name, None))]
