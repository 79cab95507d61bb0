"""Packages that only some rewards need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ppo_lightning.errors import ConfigError


def import_extra(module: str, *, package: str, extra: str, needed_by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Dotted name.
        package: What to call it.
        extra: Extra of this project that installs it.
        needed_by: Class that cannot do without.

    Raises:
        ConfigError: It is not installed; says how to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(missing_extra(package, extra, needed_by)) from error


def missing_extra(package: str, extra: str, needed_by: str) -> str:
    """Say that an optional package is missing and how to get it."""
    return (
        f"`{needed_by}` needs the package {package}, which is not installed: "
        f"pip install 'ppo-lightning[{extra}]'."
    )
