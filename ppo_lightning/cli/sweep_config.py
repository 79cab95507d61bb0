"""The config of a sweep, read as ``fit`` reads it, with any settings in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from ppo_lightning.cli.config_files import prepare_arguments
from ppo_lightning.cli.read_config import ConfigReader
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.modules import PPOModule
from ppo_lightning.modules.monitors import logged_names
from ppo_lightning.studies import written

_FOLDER_KEYS = ("dirpath", "folder")


class SweepConfig:
    """The config that a sweep varies.

    Args:
        arguments: What would follow ``fit``.

    Raises:
        ConfigError: It cannot be read, is of no PPO run, or writes to one folder in all runs.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self._base = ConfigReader.read(self.arguments)
        if not isinstance(self._base.model, PPOModule):
            kind = type(self._base.model).__name__
            raise ConfigError(f"`model`: PPO runs are swept, and the config has a {kind}.")
        _refuse_shared_folders(self.base)

    @cached_property
    def base(self) -> dict[str, Any]:
        """The whole config, defaults included."""
        return _whole(self._base)

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole config with some settings in it; ``fit`` would take it.

        Args:
            settings: By key, as on the command line.

        Raises:
            ConfigError: A key does not exist, or a value is refused.
        """
        if not settings:
            return self.base
        options = [f"--{key}={written(value)}" for key, value in settings.items()]
        self._other.reread([*self.arguments, *options])
        found = _whole(self._other)
        _refuse_shared_folders(found)
        return found

    @cached_property
    def _other(self) -> ConfigReader:
        """Reads arms; the base's own reader keeps what it has made."""
        return ConfigReader.read(self.arguments)

    @property
    def name(self) -> str:
        """Of the last config file, without its ending."""
        _, files = prepare_arguments(["fit", *self.arguments])
        return files[-1].stem if files else "sweep"

    @property
    def seed(self) -> int:
        """Of the config.

        Raises:
            ConfigError: It has none that every arm could share.
        """
        seed = self.base.get("seed_everything")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(
                f"`seed_everything: {written(seed)}` gives every run a seed of its own: give those "
                "that all arms share, as `--seeds 0,1,2`."
            )
        return seed

    def metric(self, wanted: str | None) -> str:
        """Return the metric to compare: the one wanted, or the best judge that the config has.

        Raises:
            ConfigError: The runs will not log it.
        """
        model: Any = self._base.model
        data = SimpleNamespace(val_prompts=getattr(self._base.datamodule, "val_prompts", None))
        seen = SimpleNamespace(
            trainer=SimpleNamespace(datamodule=data),
            reward_pipeline=model.reward_pipeline,
            gold=model.gold,
        )
        names = [*logged_names(seen)]
        if wanted is None:
            mode = "sampled" if model.validation.num_samples > 0 else "greedy"
            choices = (f"val/{mode}/gold", f"val/{mode}/score", "rollout/score_mean")
            return next(name for name in choices if name in names)
        if wanted not in names:
            near = nearest(wanted, names)
            hint = f" Did you mean `{near}`?" if near else ""
            raise ConfigError(
                f"`--metric {wanted}`: runs of this config do not log it.{hint} Held-out prompts "
                "and `gold` have to be in the config; docs/metrics.md lists all names."
            )
        return wanted


def default_folder(config: SweepConfig) -> Path:
    """Return where a sweep goes that is given no ``--out``."""
    return Path("sweeps") / config.name


def _whole(reader: ConfigReader) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jsonargparse calls `skip_none` by another name since
        text = reader._parser("fit").dump(reader.config["fit"], skip_none=False)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _refuse_shared_folders(config: Mapping[str, Any]) -> None:
    callbacks = config["trainer"].get("callbacks") or []
    for number, callback in enumerate(callbacks if isinstance(callbacks, list) else [callbacks]):
        arguments = callback.get("init_args", {}) if isinstance(callback, Mapping) else {}
        for key in _FOLDER_KEYS:
            if arguments.get(key) is not None:
                raise ConfigError(
                    f"`trainer.callbacks[{number}].init_args.{key}: {arguments[key]}`: all runs of "
                    "a sweep would write into one folder; leave it out, and each has its own."
                )
