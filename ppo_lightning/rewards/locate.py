"""Find a Python function that a config names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_lightning.errors import ConfigError, nearest

_FORMS = "`package.module:name`, `package.module.name` or `path/to/file.py:name`"


def split_target(target: str) -> tuple[str, str]:
    """Split a function's address into module (or file) and name.

    Args:
        target: ``package.module:name``, ``package.module.name`` or ``file.py:name``.

    Raises:
        ConfigError: It is none of these.
    """
    separator = ":" if ":" in target else "."
    place, _, name = target.rpartition(separator)
    is_name = all(part.isidentifier() for part in name.split("."))
    if not place or not is_name or target.endswith(".py"):
        raise ConfigError(f"`function` must have the form {_FORMS}, got {target!r}.")
    return place, name


def load_function(target: str) -> Callable[..., Any]:
    """Import the function at an address.

    Args:
        target: As for `split_target`.

    Raises:
        ConfigError: There is no such file, module or name, or it cannot be called; says what is
            near. Errors in the user's own module come through as they are.
    """
    place, name = split_target(target)
    is_file = place.endswith(".py") or "/" in place or os.sep in place
    found: Any = _module_of_file(place) if is_file else _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(_missing(found, part, place))
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"`function`: {target} is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        # A module that the user's own one failed to import is another matter.
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"`function`: no module `{error.name}` (of `{path}`). Install it, put its folder on "
            "PYTHONPATH, or name the file itself: `path/to/file.py:name`."
        ) from error


def _module_of_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        beside = [f.name for f in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(
            f"`function`: no such file: {path}; relative paths start at the working directory, "
            f"{Path.cwd()}.{_hint(nearest(file.name, beside))}"
        )
    # Known to Python under a name of its own, as dataclasses and pickle look modules up by name;
    # another one once the file has changed, so that a notebook sees the edit.
    content = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes())
    name = f"_reward_{file.stem}_{content.hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"`function`: {path} is no Python file; it must end in `.py`.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _missing(owner: Any, name: str, place: str) -> str:
    known = [n for n in dir(owner) if not n.startswith("_") and callable(getattr(owner, n))]
    listed = ", ".join(known[:20]) or "nothing that can be called"
    hint = _hint(nearest(name, known))
    return f"`function`: `{place}` has no `{name}`.{hint} It holds {listed}."


def _hint(meant: str | None) -> str:
    return f" Did you mean `{meant}`?" if meant else ""
