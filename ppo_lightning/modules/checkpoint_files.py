"""Checkpoint files as Lightning writes and reads them: whole, and agreed on by all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from ppo_lightning.checkpointing import (
    Newest,
    is_in_parts,
    made_whole,
    newest_good,
    put_back,
    read_parts,
    why_not,
    write_checkpoint,
)
from ppo_lightning.distributed import any_rank, gather_from_ranks, pulse
from ppo_lightning.errors import CheckpointError


class CheckpointFiles(TorchCheckpointIO):
    """Writes each file wholly or not at all, and names a damaged one when it is read.

    ``PPOModule`` puts it in the place of Lightning's own; a plugin of the user's stays.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if _is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_checkpoint(checkpoint, path)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not _is_remote(path) and is_in_parts(path):
            found: dict[str, Any] = made_whole(read_parts(path))
            return found
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except Exception as error:
            problem = None if _is_remote(path) else why_not(path)
            if problem is None or not Path(path).is_file():
                raise
            raise CheckpointError(
                f"`{os.fspath(path)}` {problem}. `--ckpt_path last` takes the newest file that "
                "can be resumed."
            ) from error


class _Agreed:
    """Writes a checkpoint, and raises on every rank where one of them could not.

    The others would wait for it at the barrier that follows.

    Args:
        strategy: Whose own method is called.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.write: Callable[..., None] = strategy.save_checkpoint

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        failure = None
        with pulse.in_stage("checkpoint"):
            try:
                self.write(*args, **kwargs)
            except Exception as error:
                failure = error
            if any_rank(failure is not None, self.strategy.root_device):
                raise failure or CheckpointError(
                    "the checkpoint could not be written on another rank, which says why."
                )


def use_checkpoint_files(trainer: pl.Trainer) -> None:
    """Let the trainer's strategy write whole files; a plugin of the user's stays."""
    strategy: Any = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = CheckpointFiles()
    if not isinstance(strategy.save_checkpoint, _Agreed):
        strategy.save_checkpoint = _Agreed(strategy)


def last_checkpoint(trainer: pl.Trainer, *, trains: bool = True) -> Path | None:
    """Find the checkpoint that a run goes on from after it was stopped or killed.

    ``trainer.fit(module, data, ckpt_path=last_checkpoint(trainer))`` is what the command line does
    for ``--ckpt_path last``. Lightning's own ``"last"`` looks into the new run's folder only.

    Args:
        trainer: Not yet fitted; its folders are searched, those of earlier runs too.
        trains: Whether the run goes on from the file, rather than measuring its weights.

    Returns:
        The newest file that can be resumed; None, and a line that says so, if there is none.
    """
    folders = checkpoint_folders(trainer)
    put_back(folders)
    newest = newest_good(folders)
    _tell(newest, folders, trains=trains)
    return newest.path


def checkpoint_folders(trainer: pl.Trainer) -> list[Path]:
    """Return where runs with this trainer's settings keep their checkpoints.

    That is ``dirpath`` of its ModelCheckpoints; or else the folder of the logger's ``version``, if
    it was chosen, or of all versions; or else ``checkpoints`` in ``default_root_dir``.
    """
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    own = [Path(callback.dirpath) for callback in callbacks if callback.dirpath]
    if own:
        return own
    if not trainer.loggers:
        return [Path(trainer.default_root_dir) / "checkpoints"]
    logger = trainer.loggers[0]
    root = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
    version = getattr(logger, "_version", None)  # `version` itself would choose the next number
    if version is None or version == SLURMEnvironment.job_id():
        return [root]
    return [root / (version if isinstance(version, str) else f"version_{version}")]


def write_last(trainer: pl.Trainer) -> None:
    """Write ``last.ckpt`` now, where the run's ModelCheckpoint keeps its files; on all ranks.

    Nothing is written where there is no ModelCheckpoint: the user wants no files then.
    """
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    callback = next((c for c in callbacks if c.save_last), next(iter(callbacks), None))
    if callback is None or not callback.dirpath or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    name = f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
    path = callback.last_model_path or os.path.join(callback.dirpath, name)
    if callback.save_last:
        callback.last_model_path = path  # or the next one would be called `last-v1.ckpt`
    trainer.save_checkpoint(path)


def is_nameless(trainer: pl.Trainer) -> bool:
    """Whether this rank cannot know the run's folder: some loggers, as MLflow's, say it to one."""
    return bool(trainer.loggers) and trainer.loggers[0].name is None


def agree_on_start(trainer: pl.Trainer) -> None:
    """Let a rank that cannot know the run's folder start from the first rank's file.

    To be called on all ranks when they are connected, which they are not when ``last_checkpoint``
    is called; Lightning has the path in its hands by then, and loads the file later.
    """
    connector: Any = trainer._checkpoint_connector
    restore = connector._restore_modules_and_callbacks

    def restore_agreed(path: Any = None, *others: Any) -> None:
        vars(connector).pop("_restore_modules_and_callbacks", None)
        restore(_agreed(trainer, path), *others)

    connector._restore_modules_and_callbacks = restore_agreed


def _agreed(trainer: pl.Trainer, path: Any) -> Any:
    """Return the file that this rank starts from."""
    (first, *_) = gather_from_ranks([None if path is None else str(path)])
    readable = first is None or Path(first).exists()
    return first if is_nameless(trainer) and readable else path


@rank_zero_only
def _tell(newest: Newest, folders: list[Path], *, trains: bool) -> None:
    for line in newest.skipped:
        print(f"Not {'resumed from' if trains else 'taken'}: {line}.", file=sys.stderr)
    if newest.path is None:
        places = " or ".join(f"`{folder}`" for folder in folders)
        purpose, then = (" to resume from", ": the run starts anew") if trains else ("", "")
        print(f"There is no checkpoint{purpose} in {places}{then}.", file=sys.stderr)
    else:
        supervised = newest.steps is not None
        number = newest.steps if supervised else newest.iterations
        done = f"{number} {'step' if supervised else 'iteration'}{'s' if number != 1 else ''}"
        start = "Resuming from" if trains else "Taking the weights of"
        print(f"{start} `{newest.path}`, after {done}.", file=sys.stderr)


def _is_remote(path: Any) -> bool:
    return "://" in str(path)
