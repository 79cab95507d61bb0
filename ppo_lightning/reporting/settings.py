"""A run's config beside the defaults of the classes that it names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

CONFIG = "config.yaml"

_CLASSES = {
    "trainer": "lightning.pytorch.Trainer",
    "model": "ppo_lightning.modules.PPOModule",
    "data": "ppo_lightning.rollout.RolloutDataModule",
}
"""Class of each part of a config, where the config names none."""

_READ = ("ppo_lightning.", "lightning.")
"""Whose classes are looked at: a report must not run code that a config names."""

MAX_CHARACTERS = 400
"""Of one value."""

_UNKNOWN = object()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting that is not the default.

    Args:
        key: As on the command line, without ``init_args``.
        value: What the run had.
        default: What it would have been; ``–`` where there is none.
    """

    key: str
    value: str
    default: str


def read_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the config that a run has saved; None if there is none that can be read."""
    try:
        content = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return content if isinstance(content, Mapping) else None


def changed_settings(config: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that differ from the defaults, in the config's order."""
    found: list[Setting] = []
    for key, part in config.items():
        if key in _CLASSES and isinstance(part, Mapping):
            found += _of_class(key, part, _CLASSES[key])
        elif part is not None:
            found.append(_setting(key, part, _UNKNOWN))
    return found


def _of_class(key: str, part: Mapping[str, Any], default: str = "") -> Iterator[Setting]:
    """Compare the arguments of a class, given as such or with its path."""
    path = str(part.get("class_path", default))
    if path != default and (_class_at(path) is None or _class_at(path) is not _class_at(default)):
        yield Setting(key=key, value=path, default=default or "–")
    arguments = part.get("init_args", {} if "class_path" in part else part)
    if isinstance(arguments, Mapping):
        yield from _compared(key, arguments, _class_at(path))


def _compared(key: str, values: Mapping[str, Any], owner: Any) -> Iterator[Setting]:
    defaults, kinds = _defaults(owner), _sections(owner)
    for name, value in values.items():
        default, where = defaults.get(name, _UNKNOWN), f"{key}.{name}"
        kind = kinds.get(name)
        if kind is not None and isinstance(value, Mapping):
            below = default if default not in (None, _UNKNOWN) else _defaults(kind)
            yield from _in_section(where, value, kind, below)
        elif not _same(value, default):
            yield _setting(where, value, default)


def _in_section(key: str, values: Mapping[str, Any], kind: type, default: Any) -> Iterator[Setting]:
    """Compare a config section with the one that stands as the default, which may be changed."""
    own = default if isinstance(default, Mapping) else _plain(default)
    kinds = _sections(kind)
    for name, value in values.items():
        usual, where = own.get(name, _UNKNOWN), f"{key}.{name}"
        if name in kinds and isinstance(value, Mapping):
            yield from _in_section(where, value, kinds[name], usual or _defaults(kinds[name]))
        elif not _same(value, usual):
            yield _setting(where, value, usual)


def _setting(key: str, value: Any, default: Any) -> Setting:
    return Setting(
        key=key, value=_shown(value), default="–" if default is _UNKNOWN else _shown(default)
    )


def _shown(value: Any) -> str:
    text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=10**6)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


# ---------------------------------------------------------------------- defaults


def _class_at(path: str) -> Any:
    if not path.startswith(_READ):
        return None
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _defaults(owner: Any) -> dict[str, Any]:
    """Return what the arguments of a class are if they are not given."""
    if owner is None:
        return {}
    if is_dataclass(owner):
        made = {
            f.name: f.default_factory() for f in fields(owner) if f.default_factory is not MISSING
        }
        return {f.name: f.default for f in fields(owner) if f.default is not MISSING} | made
    try:
        parameters = inspect.signature(owner).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _sections(owner: Any) -> dict[str, type]:
    """Return the arguments of a class that are config sections."""
    if owner is None:
        return {}
    try:
        hints = get_type_hints(owner if is_dataclass(owner) else owner.__init__)
    except (NameError, TypeError, AttributeError):
        return {}
    found = {name: _section_of(hint) for name, hint in hints.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _section_of(hint: Any) -> type | None:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [option for option in options if option is not NoneType]
    if len(kinds) != 1 or not isinstance(kinds[0], type):
        return None
    return kinds[0] if is_dataclass(kinds[0]) else None


def _same(value: Any, default: Any) -> bool:
    return default is not _UNKNOWN and bool(_plain(value) == _plain(default))


def _plain(value: Any) -> Any:
    """Return a value as YAML would have it."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
