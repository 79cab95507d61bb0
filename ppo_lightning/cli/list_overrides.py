"""Options that change a part of a list: ``--model.rewards[rm].component.init_args.path runs/rm``.

jsonargparse takes a list as a whole. Here such an option is worked into the list as it stands at
that place of the command line, which jsonargparse is then given instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader
from typing_extensions import override

from ppo_lightning.cli.config_files import CONFIG_OPTIONS, is_inline
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.io import read_text

_BRACKETED = re.compile(r"--(?P<list>[\w.]+)(?P<below>\[[^=]*)")
_STEP = re.compile(r"\[(?P<entry>[^\]]+)\]|\.(?P<key>[\w-]+)")
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NOTHING = object()


@dataclass(frozen=True)
class _Option:
    """An option with its value, and the places of the arguments that it was."""

    name: str
    value: str
    start: int
    end: int


@dataclass(frozen=True)
class _Layer:
    """A config, or what an option is as one; later ones override."""

    config: Any
    is_file: bool = False


def override_lists(arguments: Sequence[str]) -> list[str]:
    """Replace options that change a part of a list by the whole list.

    An entry is named by its position, ``[0]``, or by its ``name``, ``[rm]``; ``init_args`` may be
    left out. The list is what config files and options before the option make it.

    Args:
        arguments: Of the command line, config files by their paths.

    Raises:
        ConfigError: No value, no such list, or no such entry; says what there is.
    """
    layers: list[_Layer] = []
    given: dict[int, tuple[int, list[str]]] = {}  # start: end and what is given instead
    changed: dict[tuple[str, ...], int] = {}
    for option in _options(arguments):
        found = _BRACKETED.fullmatch(option.name)
        if found is None:
            layers.append(_layer(option))
            continue
        keys = _plain(found["list"])
        whole = _changed_list(option, keys, found["below"], layers)
        layers.append(_Layer(_nested(keys, whole)))
        if keys in changed:  # what came of it is in this one
            given[changed[keys]] = (given[changed[keys]][0], [])
        changed[keys] = option.start
        given[option.start] = (option.end, [f"--{'.'.join(keys)}={_written(whole)}"])
    return _with(arguments, given)


def _with(arguments: Sequence[str], given: Mapping[int, tuple[int, list[str]]]) -> list[str]:
    result, place = [], 0
    for start, (end, instead) in sorted(given.items()):
        result += [*arguments[place:start], *instead]
        place = end
    return [*result, *arguments[place:]]


def _options(arguments: Sequence[str]) -> Iterator[_Option]:
    """Yield the options that have a value."""
    place = 0
    while place < len(arguments):
        name, equals, value = arguments[place].partition("=")
        start, place = place, place + 1
        if not name.startswith("-"):
            continue
        if equals:
            yield _Option(name, value, start, place)
        elif place < len(arguments) and not _is_name(arguments[place]):
            yield _Option(name, arguments[place], start, place + 1)
            place += 1
        elif _BRACKETED.fullmatch(name):
            raise ConfigError(f"`{name}` has no value; give it as `{name} VALUE`.")


def _is_name(argument: str) -> bool:
    """Whether it is an option, not the value of one, which may be ``-1``."""
    return argument.startswith("--") or argument in CONFIG_OPTIONS


# ---------------------------------------------------------------------- what the list is


def _layer(option: _Option) -> _Layer:
    """Return an option as the config that it stands for."""
    if option.name in CONFIG_OPTIONS:
        text = option.value if is_inline(option.value) else read_text(Path(option.value))
        return _Layer(_read(text), is_file=True)
    return _Layer(_nested(_plain(option.name.lstrip("-")), _read(option.value)))


def _read(text: str) -> Any:
    """Read a value as jsonargparse does: ``1e-5`` is a number, what is no YAML is a text."""
    try:
        return get_loader("yaml")(text) if text.strip() else text
    except yaml.YAMLError:
        return text


def _plain(keys: str) -> tuple[str, ...]:
    return tuple(key for key in keys.split(".") if key != "init_args")


def _nested(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _value(config: Any, keys: Sequence[str]) -> Any:
    """Return what stands at a key, ``init_args`` left out of it, or ``_NOTHING``."""
    for key in keys:
        inner = config.get("init_args") if isinstance(config, Mapping) else None
        homes = [home for home in (config, inner) if isinstance(home, Mapping) and key in home]
        if not homes:
            return _NOTHING
        config = homes[0][key]
    return config


def _merged(layers: Sequence[_Layer], keys: Sequence[str]) -> Any:
    """Put the layers together: the last one that sets the list wins, ``KEY+`` adds to it."""
    merged: Any = _NOTHING
    *outer, name = keys
    for layer in layers:
        if (value := _value(layer.config, keys)) is not _NOTHING:
            merged = value
        if (more := _value(layer.config, [*outer, f"{name}+"])) is not _NOTHING:
            before = merged if isinstance(merged, list) else []
            merged = [*before, *(more if isinstance(more, list) else [more])]
    return merged


# ---------------------------------------------------------------------- what is changed in it


def _changed_list(
    option: _Option, keys: tuple[str, ...], below: str, layers: Sequence[_Layer]
) -> list[Any]:
    steps = list(_STEP.finditer(below))
    if "".join(step[0] for step in steps) != below:
        raise ConfigError(
            f"`{option.name}` cannot be read: entries of a list are written `[0]` or `[name]`, "
            "and a key follows after a dot."
        )
    told = ".".join(keys)
    stray = next((layer for layer in layers if _is_last_entry(layer, keys)), None)
    if stray is not None:
        raise ConfigError(
            f"`{option.name}`: an option before it is about the last entry of `{told}`, without "
            "saying which; give that one, too, with its position, as `[0]`."
        )
    whole = _merged(layers, keys)
    if not isinstance(whole, list):
        raise ConfigError(f"`{option.name}`: {_no_list(told, whole, layers)}")
    changed: list[Any] = _replaced(whole, steps, _read(option.value), (option.name, told))
    return changed


def _is_last_entry(layer: _Layer, keys: Sequence[str]) -> bool:
    """Whether it is of ``--trainer.callbacks+ X --trainer.callbacks.patience 3``."""
    return not layer.is_file and isinstance(_value(layer.config, keys), Mapping)


def _no_list(told: str, found: Any, layers: Sequence[_Layer]) -> str:
    if found is not _NOTHING and found is not None:
        return f"`{told}` is no list."
    lists = sorted({key for layer in layers for key in _lists(layer.config)})
    near = nearest(told, lists)
    hint = f"; did you mean `{near}`?" if near else "."
    return f"no config file sets the list `{told}`{hint} Set it in one, or give the whole list."


def _lists(config: Any, outer: str = "") -> Iterator[str]:
    """Yield the keys of lists, ``init_args`` left out, down to the first."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        inner = outer if key == "init_args" else f"{outer}.{key}".removeprefix(".")
        if isinstance(value, list):
            yield inner.removesuffix("+")
        yield from _lists(value, inner)


def _replaced(value: Any, steps: Sequence[re.Match[str]], new: Any, told: tuple[str, str]) -> Any:
    """Return a value with another one at the end of some steps; nothing is changed in place.

    Args:
        value: List, section or single value.
        steps: The way there.
        new: What is to stand there.
        told: The option, and the way so far, for messages.
    """
    if not steps:
        return new
    option, way = told
    step, *others = steps
    deeper = (option, f"{way}{step[0]}")
    if step["entry"] is not None:
        place = _position(value, step["entry"], told)
        inner = _replaced(value[place], others, new, deeper)
        return [*value[:place], inner, *value[place + 1 :]]
    if isinstance(value, str) and _CLASS_PATH.fullmatch(value):
        value = {"class_path": value}  # the short form of a class without arguments
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"`{option}`: `{way}` is `{value}`, which has no `{step['key']}`.")
    section, key = dict(value or {}), step["key"]
    if "class_path" in section and key not in _CLASS_KEYS:
        inner = _replaced(section.get("init_args"), steps, new, told)
        return section | {"init_args": inner}
    return section | {key: _replaced(section.get(key), others, new, deeper)}


def _position(entries: Any, wanted: str, told: tuple[str, str]) -> int:
    option, way = told
    if not isinstance(entries, list):
        raise ConfigError(f"`{option}`: `{way}` is no list.")
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and int(wanted) < len(entries):
        return int(wanted)
    near = nearest(wanted, [name for name in names if isinstance(name, str)])
    hint = f"; did you mean `[{near}]`?" if near else "."
    there = ", ".join(f"[{n}]{f' or [{name}]' if name else ''}" for n, name in enumerate(names))
    raise ConfigError(
        f"`{option}`: `{way}` has no entry `[{wanted}]`{hint} There are: {there or 'none'}."
    )


# ---------------------------------------------------------------------- writing it down


class _Writer(yaml.SafeDumper):
    """Writes what reads back as the same: texts in quotes, as in JSON, and no references."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Writer.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def _written(value: Any) -> str:
    """Write a list on one line; JSON has no word for infinity and nan."""
    return yaml.dump(
        value, Dumper=_Writer, default_flow_style=True, width=2**31, allow_unicode=True
    ).strip()
