"""A run on several ranks that loses one of them ends, and says which and in what stage."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from ppo_lightning.configs.checks import require
from ppo_lightning.distributed import (
    BETWEEN,
    START,
    Heartbeat,
    Watch,
    any_rank,
    gather_from_ranks,
    is_distributed,
    open_store,
    pulse,
    rank,
    world_size,
)
from ppo_lightning.errors import RankError, first_line
from ppo_lightning.modules.interrupts import how_to_go_on

_COLLECTIVE = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Watchdog(pl.Callback):
    """End a run on several ranks that one of them keeps waiting for ever, and name that rank.

    Every rank tells the others its stage, its place and its progress. A run ends where a rank's
    process is gone, has failed, is not heard of for ``timeout``, or makes no progress for
    ``timeout`` while others wait for it; never since a rank is slow. A command ends with exit
    status 75, in Python ``RankError`` is raised where the waiting can be broken off, and else the
    process ends with 75. This project's modules add it to every run on several ranks.

    Progress is a sampled token, a reward component, a request that a reward server has answered,
    a microbatch, a part of a file that was written, a hook of the Trainer. What comes before the
    first stage (loading) is not timed; a process that ends in it is noticed.

    Args:
        timeout: Seconds; None is off. Should be less than the ``timeout`` of the strategy.
        interval: Seconds between two heartbeats of a rank; with more than 64 ranks they are rarer.
    """

    def __init__(self, timeout: float | None = 900.0, interval: float = 1.0) -> None:
        require(interval > 0, f"`interval` must be above 0, got {interval}.")
        require(
            timeout is None or timeout >= 2 * interval,
            f"`timeout` must be at least two times `interval` ({interval}), got {timeout}.",
        )
        self.timeout, self.interval = timeout, interval
        self._watch: Watch | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.timeout is None or not is_distributed():
            return
        pulse.enter(START)
        pulse.iteration = pulse.step = 0
        heartbeat = _connected(self.interval, pl_module)
        if heartbeat is None:
            return
        advice = partial(how_to_go_on, trainer)
        self._watch = Watch(heartbeat, timeout=self.timeout, advice=advice)
        self._watch.start()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.leave()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if isinstance(exception, SIGTERMException):  # all ranks raise it
            watch.leave()
        elif is_broken_collective(exception):
            told = RankError(watch.explain(first_line(exception)))
            _raise_instead(trainer, told, exception)
        else:
            watch.fail(f"{type(exception).__name__}: {first_line(exception)}")

    # ------------------------------------------------------------------ where the run is

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.enter(BETWEEN)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.enter(BETWEEN)
        pulse.iteration, pulse.step = trainer.current_epoch, 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pulse.step = batch_idx
        pulse.enter(BETWEEN)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pulse.enter(BETWEEN)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.beat()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.enter(BETWEEN)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.enter(BETWEEN)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pulse.enter(BETWEEN)


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error says no more than that ranks could not reach each other."""
    if isinstance(error, dist.DistError):
        return True
    words = str(error).lower()
    return type(error) is RuntimeError and any(word in words for word in _COLLECTIVE)


def _connected(interval: float, module: Any) -> Heartbeat | None:
    """Bring the ranks together; without a store the run goes on unwatched, and says so."""
    store, port = None, 0
    if rank() == 0:
        store = open_store("localhost", None)
        port = store.port
    (first, *_) = gather_from_ranks([port])
    problem = ""
    try:
        host = os.environ.get("MASTER_ADDR", "localhost")
        store = store or open_store(host, first)
        options = {"rank": rank(), "world_size": world_size(), "interval": interval}
        heartbeat = Heartbeat(store, **options)  # type: ignore[arg-type]
        heartbeat.begin()
    except Exception as error:
        problem = first_line(error)
    if not any_rank(bool(problem), module.device):
        return heartbeat
    rank_zero_warn(
        "Watchdog is off: a rank cannot reach the port that rank 0 has opened for heartbeats "
        f"({problem or 'its log says why'}). Ranks must reach each other at any port."
    )
    return None


def _raise_instead(trainer: Any, told: RankError, cause: BaseException) -> None:
    """Let Lightning clear up after an error, and raise another one in its place."""
    teardown = trainer._teardown

    def teardown_and_raise() -> None:
        vars(trainer).pop("_teardown", None)
        teardown()
        raise told from cause

    trainer._teardown = teardown_and_raise
