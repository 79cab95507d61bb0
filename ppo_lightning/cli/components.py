"""A reward component from a file of its own, as it stands in a config's list of rewards."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.errors import ConfigError, first_line

if TYPE_CHECKING:
    from ppo_lightning.rewards import Reward


def read_component(path: str | PathLike[str]) -> Reward:
    """Make the component that a file names.

    Args:
        path: YAML or JSON with ``class_path`` and ``init_args``.

    Raises:
        ConfigError: There is no such file, or it names no component that can be made.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    from ppo_lightning.cli.config_errors import reason
    from ppo_lightning.rewards import Reward

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--component", type=Reward, required=True)
    try:
        made = parser.instantiate(parser.parse_object({"component": _block(Path(path))}))
    except (ArgumentError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: {reason(str(error))}") from error
    component: Reward = made.component
    return component


def _block(path: Path) -> dict[str, Any]:
    import yaml

    try:
        block = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"`--component`: {path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML or JSON in UTF-8: {first_line(error)}.") from error
    if not isinstance(block, dict) or "class_path" not in block:
        raise ConfigError(
            f"{path} must hold a component as a config names it: `class_path: "
            "ppo_lightning.rewards.LexiconReward`, and `init_args` where it takes some."
        )
    return block
