"""Checks of a parsed config before anything is built: messages have file, line and the full key."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args

from jsonargparse import Namespace

from ppo_lightning.checkpointing import why_not_lightnings
from ppo_lightning.cli.classes import argument_types, is_section, resolve, section_class
from ppo_lightning.cli.config_files import find_key
from ppo_lightning.configs.checks import allows_none
from ppo_lightning.errors import ConfigError

_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
_PLAIN = (bool, int, float, str, tuple)


def check_checkpoint(path: Any) -> None:
    """Check that a checkpoint is there and is one, before models are loaded.

    Args:
        path: As Lightning takes it: file, URL, or one of its words; None passes.

    Raises:
        ConfigError: There is none, or it is something else.
    """
    if path is None or str(path).split(":")[0] in _CHECKPOINT_WORDS or "://" in str(path):
        return
    if not Path(path).exists():
        raise ConfigError(f"`ckpt_path`: there is no checkpoint `{path}`.")
    problem = why_not_lightnings(path)
    if problem is not None:
        raise ConfigError(
            f"`ckpt_path`: `{path}` {problem}. Name a file that "
            "`ppo-lightning fit` wrote, or `last`."
        )


def check_seed(seed: Any, files: Sequence[Path] = ()) -> None:
    """Refuse a seed that the libraries do not take.

    Args:
        seed: Of ``seed_everything``; True draws one, False sets none.
        files: Config files, later ones overriding.

    Raises:
        ConfigError: Outside [0, 2³² - 1].
    """
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        place = find_key(files, "seed_everything", str(seed))
        raise ConfigError(f"{place}`seed_everything` must lie in [0, {2**32 - 1}], got {seed}.")


def check_section(value: Any, section: str, kind: Any = None, files: Sequence[Path] = ()) -> None:
    """Check a section of the config with all that is inside it.

    Null is refused where a type has none: the parser lets it pass. Dataclasses check their values.

    Args:
        value: What was parsed: ``class_path`` and ``init_args``, or the arguments of ``kind``.
        section: Its key: ``model``, ``data`` or ``trainer``.
        kind: Class whose arguments the section holds; None where it names one.
        files: Config files, later ones overriding.

    Raises:
        ConfigError: Something in it cannot be used.
    """
    try:
        if kind is None:
            _checked(value, Any, section)
        elif isinstance(value, Namespace):
            _checked_arguments(value, kind, section)
        else:
            raise ConfigError(f"`{section}` must hold keys and values, got {_written(value)}.")
    except ConfigError as error:
        key = re.match(r"(?:in )?`(.+?)`", str(error))
        value = "null" if "must not be null" in str(error) else None
        place = _place(files, key[1], value) if key else ""
        raise ConfigError(f"{place}{error}") from error


def with_place(message: str, config: Namespace, files: Sequence[Path] = ()) -> str:
    """Put file, line and key before what was said of a setting, if the config has just one such.

    Args:
        message: In this project's form: the setting in back-ticks first.
        config: Of the command.
        files: Config files, later ones overriding.
    """
    named = re.match(r"`([\w.]+)`", message)
    keys = [key for key in _keys(config) if named and f".{key}".endswith(f".{named[1]}")]
    if named is None or len(keys) != 1:
        return message
    outer = keys[0].removesuffix(named[1]).rstrip(".")
    return f"{_place(files, keys[0])}{f'in `{outer}`: ' if outer else ''}{message}"


def _checked(value: Any, hint: Any, key: str) -> Any:
    """Return a value with the config sections in it built."""
    if is_section(hint) or _is_written_out(value, hint):
        return _built(value, hint, key)
    if isinstance(value, list):
        item = next(iter(get_args(hint)), Any)
        return [_checked(part, item, f"{key}[{number}]") for number, part in enumerate(value)]
    if isinstance(value, Namespace) and isinstance(value.get("init_args"), Namespace):
        kind = resolve(value["class_path"])
        _checked_arguments(value["init_args"], kind, f"{key}.init_args")
    return value


def _is_written_out(value: Any, hint: Any) -> bool:
    """Whether what may be a section or something plain, such as a number, is the section here."""
    if not isinstance(value, Namespace) or section_class(hint) is None:
        return False
    return "class_path" not in value or is_dataclass(resolve(value["class_path"]))


def _built(value: Any, hint: Any, key: str) -> Any:
    kind = section_class(hint)
    assert kind is not None
    if value is None and allows_none(hint):
        return None
    if not isinstance(value, Namespace):
        raise ConfigError(f"`{key}` must hold keys and values, got {_written(value)}.")
    # jsonargparse keeps the arguments of an optional section beside its class.
    inner: Namespace = value.get("init_args", value)
    arguments = _checked_arguments(inner, kind, key)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ConfigError(f"in `{key}`: {error}") from error


def _checked_arguments(values: Namespace, kind: Any, key: str) -> dict[str, Any]:
    types, defaults = argument_types(kind), _defaults(kind)
    checked = {}
    for name, value in vars(values).items():
        hint, default = types.get(name, Any), defaults.get(name, inspect.Parameter.empty)
        if value is None and default is not None and not allows_none(hint):
            raise ConfigError(f"`{key}.{name}` must not be null: {_instead_of_null(default)}.")
        checked[name] = _checked(value, hint, f"{key}.{name}")
    return checked


def _defaults(kind: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _instead_of_null(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "give a value"
    known = f", {_written(default)}" if isinstance(default, _PLAIN) and default != () else ""
    return f"leave it out for its default{known}"


def _written(value: Any) -> str:
    """Return a value as it stands in YAML, about."""
    if value is None or isinstance(value, bool):
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value}`"


def _keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield all keys in full, positions in lists included."""
    if isinstance(value, list):
        for number, part in enumerate(value):
            yield from _keys(part, f"{key}[{number}]")
    if isinstance(value, Namespace) and is_dataclass(resolve(str(value.get("class_path")))):
        value = value.get("init_args")  # as in `_built`
    if isinstance(value, Namespace | Mapping):
        for name, part in dict(vars(value) if isinstance(value, Namespace) else value).items():
            inner = f"{key}.{name}" if key else str(name)
            yield inner
            yield from _keys(part, inner)


def _place(files: Sequence[Path], key: str, value: str | None = None) -> str:
    """Return ``"file:line: "`` of a key, or of what it lies in."""
    keys = re.sub(r"\[\d+\]", "", key).split(".")
    above = (".".join(keys[:depth]) for depth in range(len(keys), 0, -1))
    found = (find_key(files, outer, value if outer == key else None) for outer in above)
    return next((place for place in found if place), "")
