"""A config made into its module and data, for commands that only look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from ppo_lightning.cli.config_files import prepare_arguments
from ppo_lightning.cli.lightning import PPOLightningCLI
from ppo_lightning.cli.list_overrides import override_lists


class ConfigReader(PPOLightningCLI):
    """Reads a config as ``fit`` does; neither a Trainer nor a run is made of it.

    Attributes:
        model: The module, with nothing loaded.
        datamodule: Its data, not read yet.
    """

    @classmethod
    def read(cls, arguments: Sequence[str]) -> ConfigReader:
        """Read the config files and options of ``fit``.

        Args:
            arguments: What would follow ``fit``.

        Raises:
            ConfigError: Something in them is wrong.
        """
        prepared, files = prepare_arguments(["fit", *arguments])
        return cls(override_lists(prepared), files)

    def reread(self, arguments: Sequence[str]) -> None:
        """Read other options by the same parser, whose making takes most of the time.

        Args:
            arguments: What would follow ``fit``.

        Raises:
            ConfigError: Something in them is wrong; the reader is of no use then.
        """
        prepared, files = prepare_arguments(["fit", *arguments])
        self.files = files
        self.parse_arguments(self.parser, override_lists(prepared))
        self.before_instantiate_classes()
        self.instantiate_classes()

    @property
    def trainer_settings(self) -> Any:
        """Settings of the Trainer, by name."""
        return self._get(self.config, "trainer")

    @override
    def _set_seed(self) -> None:
        """Set none: nothing is drawn."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Make none: it would look for devices that may not be here."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing."""
