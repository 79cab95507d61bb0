"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this project's defaults."""

from __future__ import annotations

import logging
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from typing_extensions import override

from ppo_lightning import __version__
from ppo_lightning.callbacks import (
    Doctor,
    MetricsFile,
    PredictionWriter,
    SampleTexts,
    StageProgress,
)
from ppo_lightning.cli.callback_lists import settle
from ppo_lightning.cli.checks import check_checkpoint, check_section, check_seed, with_place
from ppo_lightning.cli.config_errors import explain, reason
from ppo_lightning.cli.config_files import prepare_arguments
from ppo_lightning.cli.file_errors import file_problem
from ppo_lightning.cli.list_overrides import override_lists
from ppo_lightning.cli.save_config import KeepConfigs
from ppo_lightning.cli.strategies import strategy_of
from ppo_lightning.cli.tables import scores_table
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.modules import last_checkpoint
from ppo_lightning.modules.checkpoint_files import is_nameless

ENV_PREFIX = "PPO_LIGHTNING"
"""``PPO_LIGHTNING_FIT__TRAINER__MAX_EPOCHS=3`` is ``--trainer.max_epochs 3`` of ``fit``."""

_HEADER = f"ppo-lightning {__version__}"
_OPTIONS_ONLY = ("help", "config")  # of the command line, not of a file


class ParseFailure(Exception):
    """What jsonargparse could not make sense of, in its words."""


class Parser(LightningArgumentParser):
    """A parser that raises where jsonargparse would print its usage and exit.

    A mistyped option is an error, not short for another: jsonargparse makes parsers of this class
    for the arguments of classes, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @override
    def parse_args(self, args: Any = None, *others: Any, **settings: Any) -> Any:
        # To the parser of a class's arguments jsonargparse hands `null` on as Python's `None`,
        # which it would then take for text.
        given = [f"{a[:-4]}null" if a.endswith("=None") else a for a in args or ()]
        return super().parse_args(args if args is None else given, *others, **settings)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers that jsonargparse makes to try a value out do not exit, and catch what they raise.
        if not self.exit_on_error:
            super().error(message, ex)
        raise ParseFailure(message) from ex


class PPOLightningCLI(LightningCLI):
    """LightningCLI with this project's modules, callbacks and messages.

    The model is any LightningModule, ``PPOModule`` unless the config names another; the data any
    LightningDataModule, ``RolloutDataModule`` unless the config names another.

    Args:
        arguments: Of the command line, the command first.
        files: Config files among them, for messages about them.
    """

    def __init__(self, arguments: Sequence[str], files: Sequence[Path] = ()) -> None:
        self.files = files
        self._command = next(iter(arguments), "")
        super().__init__(
            pl.LightningModule,
            pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=KeepConfigs,
            seed_everything_default=0,
            trainer_defaults={
                "num_sanity_val_steps": 0,  # it would answer prompts before anything is trained
                "log_every_n_steps": 1,
                "enable_model_summary": False,
            },
            parser_class=Parser,
            parser_kwargs={
                "prog": "ppo-lightning",
                "default_env": True,
                "env_prefix": ENV_PREFIX,
                **{name: {"dump_header": [_HEADER]} for name in self.subcommands()},
            },
            args=list(arguments),
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in the parent
        """Return the command at hand alone: the parsers of the others would never be asked."""
        known = LightningCLI.subcommands()
        return {self._command: known[self._command]} if self._command in known else known

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults(
            {
                "model": {"class_path": "ppo_lightning.modules.PPOModule"},
                "data": {"class_path": "ppo_lightning.rollout.RolloutDataModule"},
            }
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # Not the parent's: it warns that `sys.argv` is there as well.
        try:
            self.config = parser.parse_args(args)
        except (ParseFailure, ArgumentError) as failure:
            command = next((word for word in args if word in self.subcommands()), "fit")
            dests = [action.dest for action in self._subcommand_parsers[command]._actions]
            message = explain(
                str(failure),
                command=command,
                known_keys=[key for key in dests if not key.endswith(_OPTIONS_ONLY)],
                files=self.files,
            )
            raise ConfigError(message) from failure

    @override
    def _parse_ckpt_path(self) -> None:
        """Do nothing: the parent reads the whole checkpoint for hyperparameters kept in it."""

    @override
    def _set_seed(self) -> None:
        check_seed(self._get(self.config, "seed_everything"), self.files)
        super()._set_seed()

    @override
    def before_instantiate_classes(self) -> None:
        check_checkpoint(self._get(self.config, "ckpt_path"))
        check_section(self._get(self.config, "trainer"), "trainer", pl.Trainer, self.files)
        for section in ("model", "data"):
            check_section(self._get(self.config, section), section, files=self.files)

    @override
    def instantiate_classes(self) -> None:
        try:
            with self._files_told():
                super().instantiate_classes()
        except (ValueError, TypeError, ArgumentError) as error:
            raise ConfigError(self._with_place(reason(str(error)))) from error

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            with self._files_told():
                super()._run_subcommand(subcommand)
        except ValueError as error:  # this project's own are, too
            told = self._with_place(str(error))
            if type(error) not in (ConfigError, ModelError, ValueError) or told == str(error):
                raise
            raise ConfigError(told) from error

    @contextmanager
    def _files_told(self) -> Iterator[None]:
        """Put a refusal of the file system in words that know where the run writes."""
        try:
            yield
        except OSError as error:
            told = file_problem(error, self._run_folders())
            if told is None:
                raise
            raise ConfigError(told) from error

    def _run_folders(self) -> list[Path]:
        root = self._get(self.config, "trainer").default_root_dir
        loggers = self.trainer.loggers if hasattr(self, "trainer") else []
        own = [Path(root)] if root else [Path("lightning_logs"), Path("checkpoints")]
        given = [Path(logger.save_dir) for logger in loggers if logger.save_dir]
        return [*own, *(folder for folder in given if folder.absolute() != Path.cwd())]

    def _with_place(self, message: str) -> str:
        return with_place(message, self.config[str(self.subcommand)], self.files)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        config = self._get(self.config_init, "trainer")
        given = _as_list(config.get("callbacks"))
        config["strategy"] = strategy_of(config.get("strategy", "auto"))
        if config.get("barebones"):
            config["log_every_n_steps"] = None  # Lightning refuses our default beside it
            return super().instantiate_trainer(**kwargs)
        given, replaced = settle(given)
        for line in replaced:
            rank_zero_info(line)
        extra = default_callbacks(str(self.subcommand), given)
        if config.get("enable_progress_bar") is False:
            extra = [callback for callback in extra if not isinstance(callback, ProgressBar)]
        return super().instantiate_trainer(callbacks=[*given, *extra], **kwargs)

    def fit(self, **kwargs: Any) -> None:
        """Train; ``ckpt_path: last`` goes on where an earlier run of the config was stopped."""
        if kwargs.get("ckpt_path") == "last":
            kwargs["ckpt_path"] = last_checkpoint(self.trainer)
        self.trainer.fit(**kwargs)

    def test(self, **kwargs: Any) -> None:
        """Answer the held-out prompts and print their scores."""
        kwargs["verbose"] = False
        self._require_last(kwargs)
        self._print_scores(self.trainer.test(**kwargs))

    def validate(self, **kwargs: Any) -> None:
        """Do what ``test`` does, with the hooks and names of validation."""
        kwargs["verbose"] = False
        self._require_last(kwargs)
        self._print_scores(self.trainer.validate(**kwargs))

    def predict(self, **kwargs: Any) -> None:
        """Answer the held-out prompts; `PredictionWriter` writes the answers."""
        kwargs["return_predictions"] = False
        self._require_last(kwargs)
        self.trainer.predict(**kwargs)

    def _require_last(self, kwargs: dict[str, Any]) -> None:
        """Put the file in the place of ``last``; an untrained model is not what was asked for."""
        if kwargs.get("ckpt_path") == "last":
            kwargs["ckpt_path"] = last_checkpoint(self.trainer, trains=False)
            if kwargs["ckpt_path"] is None and not is_nameless(self.trainer):
                raise ConfigError("`ckpt_path: last`: no run has left a checkpoint; name a file.")

    @rank_zero_only
    def _print_scores(self, results: Sequence[Mapping[str, float]]) -> None:
        merged = {name: value for result in results for name, value in result.items()}
        merged.pop("step", None)  # the loggers' x axis
        print(scores_table(merged))


def run(arguments: Sequence[str]) -> None:
    """Run one of the Trainer's commands.

    Args:
        arguments: The command and what follows it.

    Raises:
        ConfigError: Something in the config or on the command line is wrong.
    """
    prepared, files = prepare_arguments(arguments)
    # Between Lightning and the newest PyTorch; nothing that a user could mend.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`")
    # A resumed run has a new folder; the best files of the earlier one stay where they are.
    warnings.filterwarnings("ignore", "The dirpath has changed")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_of_use)
    PPOLightningCLI(override_lists(prepared), files)


_OF_NO_USE = (
    "💡",  # advertises other products
    "Loading `train_dataloader` to estimate",
)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a line of Lightning's log tells a user something about the run."""
    return not record.getMessage().startswith(_OF_NO_USE)


def default_callbacks(command: str, given: Sequence[pl.Callback]) -> list[pl.Callback]:
    """Return the callbacks of a command that the config does not bring itself.

    Args:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        given: Callbacks of the config.
    """
    wanted: list[tuple[type[pl.Callback], Callable[[], pl.Callback]]] = [
        (ProgressBar, StageProgress)
    ]
    if command == "predict":
        wanted.append((PredictionWriter, PredictionWriter))
    else:
        wanted.append((SampleTexts, SampleTexts))
    if command == "fit":
        wanted.append((MetricsFile, MetricsFile))
    wanted.append((Doctor, Doctor))  # of a checkpoint, too: its state is in there
    return [make() for kind, make in wanted if not any(isinstance(item, kind) for item in given)]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
