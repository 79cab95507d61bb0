"""Processor time of an iteration that is not the algorithm's: loop, callbacks, logs, checkpoints.

    OMP_NUM_THREADS=1 python experiments/speed/overhead.py --size M
    OMP_NUM_THREADS=1 python experiments/speed/overhead.py --size S --profile overhead.prof

A fit as the command line makes it: TensorBoard, ``metrics.jsonl``, score reports, sample texts,
the live progress bar, a checkpoint every ``--save-every`` iterations. What the algorithm computes
is measured where it is called, and everything else is what the frame around it costs:

* computing: sampling, rewards, passes of the networks, shaping and advantages, forward and
  backward of the update, norms and clipping of gradients, the optimiser's step;
* data: texts of responses, rows of minibatches, prompts;
* ledger: sums, statistics and decisions of this project;
* callbacks, logging, checkpoint: their hooks, the loggers, the files;
* loop: what is left, which is Lightning's.

Time is that of the main thread, each moment charged to the innermost part only; what other threads
use (TensorBoard's writer) is charged to logging. Torch has one thread, so none of them computes.
The first iteration is a warm-up. Shares leave the checkpoint out: how often one is written is a
setting, and its seconds stand beside the others. ``--profile`` writes a profile of what is left
when the computing is cut out, for ``pstats``.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import io
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

from experiments.speed import ppo
from experiments.speed.sizes import SIZES
from ppo_lightning.callbacks import SampleTexts, StageProgress
from ppo_lightning.modules import collection, stages, update_steps, updater
from ppo_lightning.modules import ppo as ppo_module
from ppo_lightning.modules.reporting import IterationLedger
from ppo_lightning.rewards import RewardPipeline
from ppo_lightning.rollout import NativeEngine, RolloutDataModule, loader
from ppo_lightning.types import Experience

COMPUTING, DATA, LEDGER, LOOP = "computing", "data", "ledger", "loop"
CALLBACKS, LOGGING, CHECKPOINT = "callbacks", "logging", "checkpoint"
FRAME = (DATA, LEDGER, CALLBACKS, LOGGING, LOOP)
"""Whatever is not computing, but for checkpoints."""

PLACES: tuple[tuple[str, Any, str], ...] = (
    (COMPUTING, NativeEngine, "generate"),
    (COMPUTING, RewardPipeline, "__call__"),
    (COMPUTING, collection, "score_with_networks"),
    (COMPUTING, collection, "build_experience"),
    (COMPUTING, updater, "accumulate_gradients"),
    (COMPUTING, updater, "gradient_norm"),
    (COMPUTING, updater, "clip_gradients"),
    (COMPUTING, torch.Tensor, "backward"),
    (COMPUTING, torch.optim.AdamW, "step"),
    (LOOP, pl.LightningModule, "manual_backward"),
    (DATA, collection, "completions_of"),
    (DATA, Experience, "select"),
    (DATA, RolloutDataModule, "_next_experience"),
    (DATA, loader, "minibatch_rows"),
    (LEDGER, ppo_module.PPOModule, "training_step"),
    (LEDGER, ppo_module.PPOModule, "collect"),
    (LEDGER, ppo_module.PPOModule, "on_train_epoch_end"),
    (LEDGER, ppo_module.PPOModule, "on_train_batch_end"),
    (LEDGER, IterationLedger, "add_rollout"),
    (CALLBACKS, call, "_call_callback_hooks"),
    (CALLBACKS, ppo_module, "call_listeners"),
    (CALLBACKS, stages, "call_listeners"),
    (CALLBACKS, update_steps, "call_listeners"),
    (LOGGING, update_steps, "log_iteration"),
    (CHECKPOINT, pl.Trainer, "save_checkpoint"),
)
"""What is charged where: a function of a class or module, also within another's."""


class Shares:
    """Processor time of this thread, each moment charged to the innermost part."""

    def __init__(self, profile: cProfile.Profile | None = None) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.profile = profile
        self.counting = False
        self._parts = [LOOP]
        self._since = time.thread_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what is done inside to a part."""
        self._charge()
        self._parts.append(name)
        self._watch()
        try:
            yield
        finally:
            self._charge()
            self._parts.pop()
            self._watch()

    def take(self) -> dict[str, float]:
        """Return what was charged since the last call."""
        self._charge()
        taken, self.spent = dict(self.spent), defaultdict(float)
        return taken

    def _charge(self) -> None:
        now = time.thread_time()
        self.spent[self._parts[-1]] += now - self._since
        self._since = now

    def _watch(self) -> None:
        """Profile what is neither computed nor written as a checkpoint."""
        if self.profile is None:
            return
        if self.counting and self._parts[-1] not in (COMPUTING, CHECKPOINT):
            self.profile.enable()
        else:
            self.profile.disable()


class Iterations(pl.Callback):
    """Seconds of every part, for each iteration from its start to the start of the next."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.rows: list[dict[str, float]] = []
        self._main = self._all = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        """Keep the iteration before."""
        self._keep()

    def on_train_end(self, *_: Any) -> None:
        """Keep the last iteration."""
        self._keep()
        self.shares.counting = False

    def _keep(self) -> None:
        main, everything = time.thread_time(), time.process_time()
        row = self.shares.take()
        others = (everything - self._all) - (main - self._main)
        row[LOGGING] = row.get(LOGGING, 0.0) + max(0.0, others)
        self._main, self._all = main, everything
        self.rows.append(row)
        self.shares.counting = len(self.rows) > 1  # what was kept are the start and the warm-up


def charged(shares: Shares, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, charged to a part."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        with shares.part(name):
            return function(*arguments, **options)

    return wrapper


def measured(given: Any, shares: Shares) -> list[dict[str, float]]:
    """Train; returns the seconds of every part, for each iteration that is counted."""
    counter = Iterations(shares)
    callbacks = [counter, StageProgress(live=True), SampleTexts()]
    callbacks.append(ModelCheckpoint(every_n_epochs=given.save_every))
    settings = ppo.options(size=given.size, mode=given.mode, iters=given.iters + 1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(redirect_stderr(io.StringIO()))
        for name, owner, attribute in PLACES:
            function = charged(shares, name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, function))
        ppo.run(
            SIZES[given.size],
            settings,
            Path(folder),
            *callbacks,
            logger=True,
            enable_checkpointing=True,
            enable_progress_bar=True,
        )
    return counter.rows[2:]  # before the first iteration, and the first


def report(given: Any, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Average over iterations, and give shares of all but the checkpoint."""
    parts = (COMPUTING, *FRAME, CHECKPOINT)
    seconds = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in parts}
    whole = sum(spent for name, spent in seconds.items() if name != CHECKPOINT)
    saved = sum(CHECKPOINT in row for row in rows)
    return {
        "size": given.size,
        "mode": given.mode,
        "iterations": len(rows),
        "cpu_seconds": {name: round(spent, 5) for name, spent in seconds.items()},
        "shares": {name: round(seconds[name] / whole, 5) for name in (COMPUTING, *FRAME)},
        "frame_share": round(sum(seconds[name] for name in FRAME) / whole, 5),
        "checkpoint_seconds_each": round(seconds[CHECKPOINT] * len(rows) / saved, 4)
        if saved
        else None,
        "limit": given.limit,
        "load1": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """Write the parts as a Markdown table."""
    lines = ["| part | seconds | share |", "| --- | --- | --- |"]
    for name, share in result["shares"].items():
        lines.append(f"| {name} | {result['cpu_seconds'][name]:.4f} | {share:.2%} |")
    lines.append(f"| all but computing | | {result['frame_share']:.2%} |")
    if result["checkpoint_seconds_each"] is not None:
        lines.append(f"| a checkpoint | {result['checkpoint_seconds_each']:.4f} | |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge; returns the exit code."""
    given = parser().parse_args(arguments)
    torch.set_num_threads(1)
    ppo.quieten()
    profile = cProfile.Profile(time.thread_time) if given.profile else None
    result = report(given, measured(given, Shares(profile)))
    if profile is not None:
        given.profile.parent.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(given.profile)
    print(f"{table(result)}\n\n{json.dumps(result)}", flush=True)
    return 0 if result["frame_share"] <= given.limit else 1


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--size", choices=list(SIZES), default="M")
    made.add_argument("--mode", choices=["fixed", "variable"], default="variable")
    made.add_argument("--iters", type=int, default=5, help="besides the one that is not counted")
    made.add_argument("--save-every", type=int, default=5, help="iterations between checkpoints")
    made.add_argument("--limit", type=float, default=0.03, help="most that is not computing")
    made.add_argument("--profile", type=Path, default=None, help="file for pstats")
    return made


if __name__ == "__main__":
    sys.exit(main())
