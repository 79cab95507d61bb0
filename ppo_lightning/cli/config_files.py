"""Config files: found by name, checked before they are used, and where a key stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_lightning.errors import ConfigError, DataError, nearest
from ppo_lightning.io import read_text

SCHEME = "ppo-lightning:"
"""``--config ppo-lightning:NAME`` is a config that comes with the package."""

_PACKAGE = Path(__file__).parents[1]
_EQUALS = "tag:yaml.org,2002:value"  # a lone `=`
_TEXT_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
CONFIG_OPTIONS = ("--config", "-c")


@dataclass(frozen=True)
class Entry:
    """One key of a YAML file.

    Args:
        keys: The key's own name last; positions in lists are left out.
        line: Its line, from 1.
        value: What stands there, if it is a single value.
        section: Where the mapping that holds it begins, in characters: one number for keys that
            stand side by side, another for each entry of a list.
    """

    keys: tuple[str, ...]
    line: int
    value: str | None
    section: int


def prepare_arguments(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Find and check the config files among some arguments.

    Args:
        arguments: Of the command line.

    Returns:
        The arguments with names of shipped configs replaced by paths, and the files, in order.

    Raises:
        ConfigError: A file or a shipped config does not exist.
        DataError: A file cannot be read as a config; names file and line.
    """
    prepared, files = list(arguments), []
    for place, prefix, value in _config_values(arguments):
        if is_inline(value):
            continue
        path = _resolved(value)
        list(read_entries(path))
        prepared[place] = f"{prefix}{path}"
        files.append(path)
    return prepared, files


def shipped_configs() -> dict[str, Path]:
    """Return the configs that come with the package, by name: ``quickstart``, ``ppo/quickstart``.

    They lie inside an installed package, and beside it in a checkout.
    """
    roots = (_PACKAGE / "_configs", _PACKAGE.parent / "configs")
    root = next((folder for folder in roots if folder.is_dir()), None)
    if root is None:
        return {}
    files = sorted(file.relative_to(root) for file in root.rglob("*.yaml"))
    stems = [file.stem for file in files]
    short = {file.stem: root / file for file in files if stems.count(file.stem) == 1}
    return short | {file.with_suffix("").as_posix(): root / file for file in files}


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the keys of a YAML file, nested ones too.

    Raises:
        DataError: Not YAML, not a mapping, a tag, or a key that is no text or stands twice; names
            file and line.
    """
    text = read_text(path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _broken(path, text, error) from error
    except yaml.YAMLError as error:
        raise DataError(f"is not valid YAML: {error}.", path=path) from error
    if node is None:
        raise DataError("holds no settings. Put some in, or leave it out.", path=path)
    if not isinstance(node, yaml.MappingNode):
        raise DataError("must hold keys and values at its top level, as `key: value`.", path=path)
    yield from _entries(node, (), path)


def find_key(files: Sequence[Path], key: str, value: str | None = None) -> str:
    """Return ``"file:line: "`` of a key in the last file that has it, or ``""``.

    Args:
        files: Config files, later ones overriding.
        key: In full, such as ``model.init_args.ppo``.
        value: What is set there. If the file says otherwise, it came from somewhere else.
    """
    keys = tuple(key.split("."))
    return _place(files, lambda entry: entry.keys == keys and _same(entry.value, value))


def find_beside(files: Sequence[Path], key: str) -> list[Entry]:
    """Return the keys that stand side by side with one, in the last file that has it.

    Args:
        files: Config files, later ones overriding.
        key: In full.
    """
    keys = tuple(key.split("."))
    for path in reversed(files):
        entries = list(read_entries(path))
        sections = [entry.section for entry in entries if entry.keys == keys]
        if sections:
            beside = (entry for entry in entries if entry.section == sections[0])
            return [entry for entry in beside if entry.keys != keys]
    return []


def find_class(files: Sequence[Path], path: str) -> str:
    """Return ``"file:line: "`` of the last ``class_path: path``, or ``""``."""
    return _place(files, lambda entry: entry.keys[-1] == "class_path" and entry.value == path)


def _place(files: Sequence[Path], wanted: Callable[[Entry], bool]) -> str:
    for path in reversed(files):
        for entry in read_entries(path):
            if wanted(entry):
                return f"{path}:{entry.line}: "
    return ""


def _same(written: str | None, read: str | None) -> bool:
    """Whether a value as written may have been read as another text: ``1e6`` as ``1000000.0``."""
    if written is None or read is None or written == read:
        return True
    if read == "null":
        return written.lower() in ("", "~", "null")
    try:
        return float(written) == float(read)
    except ValueError:
        return False


def _config_values(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (place, what stands before the value there, value) of every config option."""
    for place, argument in enumerate(arguments):
        if argument in CONFIG_OPTIONS and place + 1 < len(arguments):
            yield place + 1, "", arguments[place + 1]
        elif argument.startswith("--config="):
            yield place, "--config=", argument.removeprefix("--config=")


def is_inline(value: str) -> bool:
    """Whether it is a config itself: jsonargparse takes YAML and JSON in the place of a path."""
    return value.lstrip().startswith("{") or ": " in value or "\n" in value


def _resolved(value: str) -> Path:
    if value.startswith(SCHEME):
        return _shipped(value.removeprefix(SCHEME))
    path = Path(value).expanduser()
    if path.is_file():
        return path
    near = nearest(path.name, (p.name for p in path.parent.glob("*") if p.is_file()))
    hint = f" Did you mean `{path.parent / near}`?" if near else ""
    if not hint and path.stem in shipped_configs():
        hint = f" Did you mean `{SCHEME}{path.stem}`, which comes with the package?"
    raise ConfigError(f"the config file `{value}` does not exist.{hint}")


def _shipped(name: str) -> Path:
    known = shipped_configs()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        near = nearest(name, known)
        hint = f"; did you mean `{SCHEME}{near}`?" if near else "."
        names = ", ".join(sorted(name for name in known if "/" in name)) or "none"
        raise ConfigError(f"no config `{name}` comes with the package{hint} There are: {names}.")
    return path


def _broken(path: Path, text: str, error: yaml.MarkedYAMLError) -> DataError:
    mark = error.problem_mark
    assert mark is not None
    lines = text.splitlines()
    indent = lines[mark.line][: mark.column + 1] if mark.line < len(lines) else ""
    remedy = "Brackets and quotes must close, and indentation must match."
    if "\t" in indent:
        remedy = "YAML is indented with spaces: replace the tab."
    elif "undefined alias" in str(error.problem):
        remedy = "Define it above, as `&name value`, or put a text that begins with `*` in quotes."
    where = f" ({error.context})" if error.context else ""
    message = f"is not valid YAML: {error.problem}{where}. {remedy}"
    return DataError(message, path=path, line=mark.line + 1, column=mark.column + 1)


def _entries(node: Any, keys: tuple[str, ...], path: Path) -> Iterator[Entry]:
    if node.tag not in yaml.SafeLoader.yaml_constructors and node.tag != _EQUALS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        message = f"has the tag `{tag}`, which a config cannot have. Write the plain value."
        raise DataError(message, path=path, line=node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _entries(item, keys, path)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for name, child in node.value:
        line = name.start_mark.line + 1
        if not isinstance(name, yaml.ScalarNode) or (not keys and name.tag not in _TEXT_TAGS):
            message = "a key of a config must be a text, not a number, a list or a mapping."
            raise DataError(f"{message} Put it in quotes or take it out.", path=path, line=line)
        key = str(name.value)
        if key in first:
            message = f"the key `{key}` stands twice, first in line {first[key]}. Keep one of them."
            raise DataError(message, path=path, line=line)
        first[key] = line
        value = child.value if isinstance(child, yaml.ScalarNode) else None
        yield Entry((*keys, key), line, value, node.start_mark.index)
        yield from _entries(child, (*keys, key), path)
