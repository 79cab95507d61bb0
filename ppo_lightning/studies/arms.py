"""The arms of a sweep: which settings each has, and under which name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ppo_lightning.errors import ConfigError
from ppo_lightning.studies.values import Variation, short_names, written

BASE = "base"
"""Name of the arm that is the config itself."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST_VALUE = 32
_LONGEST_SHOWN = 48
_LONGEST_NAME = 120  # file systems take 255 bytes

Resolve = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Returns the whole config with some settings in it, or raises ``ConfigError``."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One variant of the config.

    Args:
        name: Of its folder; safe for file systems.
        settings: What it sets, by key; empty for the config itself.
        config: The whole config.
        label: For people, such as ``clip_range = 0.1``.
    """

    name: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any] = field(repr=False)
    label: str


@dataclass(frozen=True, kw_only=True)
class Arms:
    """The arms of a sweep.

    Args:
        all: The config itself first.
        same_as_base: Labels of variants that are the config itself, and are not run again.
    """

    all: tuple[Arm, ...]
    same_as_base: tuple[str, ...] = ()


def arms_of(varied: Sequence[Variation], resolve: Resolve, *, grid: bool = False) -> Arms:
    """Make the arms: the config itself, and one setting changed at a time, or all combinations.

    Args:
        varied: Settings with their values, checked by ``check_keys``.
        resolve: Reads the config with some settings as ``fit`` does.
        grid: All combinations.

    Raises:
        ConfigError: The config refuses a value, or two arms are the same.
    """
    base = Arm(name=BASE, settings={}, config=resolve({}), label=BASE)
    names = short_names([one.key for one in varied])
    arms, same = [base], []
    for settings in _combinations(varied, grid=grid):
        arm = make_arm(settings, names, resolve)
        twin = next((other for other in arms if other.config == arm.config), None)
        if twin is base:
            same.append(arm.label)
        elif twin is not None:
            raise ConfigError(f"`{arm.label}` and `{twin.label}` are the same; leave one out.")
        else:
            arms.append(arm)
    if len(arms) == 1:
        raise ConfigError("all values are those that the config has: there is nothing to compare.")
    return Arms(all=_with_different_names(arms), same_as_base=tuple(same))


def make_arm(
    settings: Mapping[str, Any], names: Mapping[str, str], resolve: Resolve, *, name: str = ""
) -> Arm:
    """Make one arm.

    Args:
        settings: By key.
        names: Short names of the keys.
        resolve: Reads the config with some settings as ``fit`` does.
        name: Of the folder; made of the settings by default.

    Raises:
        ConfigError: The config refuses a setting; says which.
    """
    label = ", ".join(f"{names[key]} = {_for_people(value)}" for key, value in settings.items())
    try:
        config = resolve(settings)
    except ConfigError as error:
        varied = ", ".join(f"{key}={written(value)}" for key, value in settings.items())
        raise ConfigError(f"`--vary {varied}`: {error}") from error
    return Arm(name=name or _name(settings, names), settings=settings, config=config, label=label)


def _combinations(varied: Sequence[Variation], *, grid: bool) -> list[dict[str, Any]]:
    if not grid:
        return [{one.key: value} for one in varied for value in one.values]
    keys = [one.key for one in varied]
    return [
        dict(zip(keys, values, strict=True)) for values in product(*(one.values for one in varied))
    ]


def _name(settings: Mapping[str, Any], names: Mapping[str, str]) -> str:
    parts = [f"{_safe(names[key])}={_safe(_in_short(v))}" for key, v in settings.items()]
    name = ",".join(parts)
    whole = ",".join(f"{key}={written(value)}" for key, value in settings.items())
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}-{_digest(whole)}"


def _in_short(value: Any) -> str:
    """Return what a value is called: a class by its own name, with what tells it from others."""
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        name = value["class_path"].rpartition(".")[2][:_LONGEST_VALUE]
        return name if len(value) == 1 else f"{name}-{_digest(written(value))}"
    return written(value)


def _for_people(value: Any) -> str:
    """Write a value for a table; what is long is cut, and told from its like by a digest."""
    text = written(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    if isinstance(value, Mapping) and "class_path" in value:
        return _in_short(value)
    return f"{text[:_LONGEST_VALUE]}…{_digest(text)}"


def _safe(text: str) -> str:
    """Keep what is safe in a name of a file; what had to be changed or cut gets a digest."""
    safe = _UNSAFE.sub("-", text)
    if safe == text and 0 < len(text) <= _LONGEST_VALUE:
        return text
    return f"{safe[:_LONGEST_VALUE]}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:6]


def _with_different_names(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Give a digest to names that some file systems take for the same."""
    seen: set[str] = set()
    result = []
    for arm in arms:
        name = arm.name
        if name.casefold() in seen:
            name = f"{name}-{_digest(arm.label)}"
        seen.add(name.casefold())
        result.append(Arm(name=name, settings=arm.settings, config=arm.config, label=arm.label))
    return tuple(result)
