"""A run that is told to end (SIGTERM) ends on all ranks at the same place."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ppo_lightning.checkpointing import newest_good, remove_leftovers
from ppo_lightning.distributed import any_rank, gather_from_ranks
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.checkpoint_files import (
    agree_on_start,
    checkpoint_folders,
    write_last,
)

EXIT_STATUS = 128 + signal.SIGTERM
"""What a shell says of a process that SIGTERM ended."""

_AGREED_STAGES = ("rollout", "reward", "scoring")  # entered by all ranks; of held-out batches,
# one rank may have more than another
_SAME_REQUEST_SECONDS = 1.0

_NOTICE = (
    b"\nppo-lightning: SIGTERM: the run stops at the next place that all ranks reach. A second one "
    b"ends this process at once.\n"
)
_COMPLETE = "ppo-lightning: stopped by SIGTERM after the last iteration; the run is complete."


class StopOnSigterm(pl.Callback):
    """Stop a run at SIGTERM, with exit status 143.

    The signal sets a flag. It is asked for on all ranks between the stages of a rollout and
    before every training step, so all raise at one place; Lightning's own handler waits for the
    other ranks inside the handler, maybe forever. A second SIGTERM ends the process at once. This
    project's modules add it to every run.

    Of PPO nothing is saved: the iteration is lost; resumed from the last file it comes again, bit
    for bit. A supervised run ends behind the step that it was in, and ``last.ckpt`` is written.

    Args:
        clock: Seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._asked_at: float | None = None
        self._before: Any = None
        self._trainer: pl.Trainer | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        agree_on_start(trainer)
        if stage != "fit":
            return
        self._trainer, self._asked_at = trainer, None
        self._before = signal.getsignal(signal.SIGTERM)  # the user's: Lightning's comes later
        _requeue_off(trainer)
        if trainer.is_global_zero:
            remove_leftovers(checkpoint_folders(trainer))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _require_one_start(trainer)

    # Lightning sets its handlers between `on_fit_start` and these.
    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not _is_whole_at_steps(pl_module):
            self._stop_if_asked(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A run is over for Lightning once it has all its `max_steps`, though its end is to come.
        loop = trainer.fit_loop.epoch_loop
        over = 0 <= loop.max_steps <= loop.global_step
        if _is_whole_at_steps(pl_module) and not over:
            self._stop_if_asked(trainer, pl_module)

    def on_stage_start(self, trainer: pl.Trainer, pl_module: Any, name: str) -> None:
        """Stop before a stage of the rollout; called by the module."""
        if name in _AGREED_STAGES and trainer.state.fn == "fit":
            self._stop_if_asked(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A script must not go on with its next command.
        self._stop_if_asked(trainer, pl_module, complete=True)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # After an error Lightning has put the former handler back itself.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Set the flag. No `print` in here: the signal may have come in the middle of one."""
        now = self.clock()
        if self._asked_at is None:
            self._asked_at = now
            if self._trainer is not None and self._trainer.is_global_zero:
                os.write(2, _NOTICE)
        elif now - self._asked_at > _SAME_REQUEST_SECONDS:  # `timeout` sends it twice in a row
            self._end_now()
        if callable(self._before):
            self._before(signum, frame)

    def _end_now(self) -> None:
        launcher: Any = self._trainer.strategy.launcher if self._trainer is not None else None
        if launcher is not None:
            launcher.kill(signal.SIGKILL)  # the processes that this one has started
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _stop_if_asked(self, trainer: pl.Trainer, module: Any, *, complete: bool = False) -> None:
        if any_rank(self._asked_at is not None, module.device):
            _stop(trainer, module, complete=complete)


def _stop(trainer: pl.Trainer, module: Any, *, complete: bool) -> NoReturn:
    # All iterations may be done before the last hook, and a run may end before all are done.
    complete = complete or trainer.current_epoch >= (trainer.max_epochs or 0) > 0
    if _is_whole_at_steps(module) and not complete:
        write_last(trainer)
    if trainer.is_global_zero:
        place = getattr(module, "place", None) or f"iteration {module.iteration}"
        print(_COMPLETE if complete else _farewell(trainer, place), file=sys.stderr)
    raise SIGTERMException(EXIT_STATUS)


def _is_whole_at_steps(module: Any) -> bool:
    """Whether the run can go on from the end of any step, as ``SupervisedModule`` says."""
    return bool(getattr(module, "whole_at_steps", False))


def _farewell(trainer: pl.Trainer, place: str) -> str:
    """Where the run was, and how it goes on."""
    return f"ppo-lightning: stopped by SIGTERM in {place}. {how_to_go_on(trainer)}"


def how_to_go_on(trainer: pl.Trainer) -> str:
    """Name the last good checkpoint, and what resumes from it."""
    file = newest_good(checkpoint_folders(trainer)).path
    if file is None and trainer.ckpt_path is not None:
        file = Path(trainer.ckpt_path)
    if file is None:
        return "No checkpoint was written yet: the same command starts the run again."
    return (
        f"`--ckpt_path last` goes on from `{file}`, as if the run had never stopped "
        "(in Python: `ckpt_path=last_checkpoint(trainer)`)."
    )


def _requeue_off(trainer: pl.Trainer) -> None:
    """Keep Lightning from saving inside an iteration when SLURM warns it of the end."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        environment.auto_requeue = False
        rank_zero_info(
            "Lightning's `auto_requeue` is off: it would save inside an iteration. In the job's "
            "script, with `--ckpt_path last` in the command, let `scontrol requeue $SLURM_JOB_ID` "
            f"follow exit status {EXIT_STATUS} of `srun`; SLURM does not do it by itself."
        )


def _require_one_start(trainer: pl.Trainer) -> None:
    """Refuse ranks that would start from different files.

    Raises:
        ConfigError: Such as for a folder that only one node can see.
    """
    starts = gather_from_ranks([str(trainer.ckpt_path)])
    if len(set(starts)) > 1:
        found = ", ".join(f"rank {rank}: {start}" for rank, start in enumerate(starts))
        raise ConfigError(
            f"`ckpt_path`: the ranks would start from different files ({found}). Keep checkpoints "
            "in a folder that all nodes share, or name the file."
        )
