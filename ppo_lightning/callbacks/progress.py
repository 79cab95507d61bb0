"""The progress of a run: the stage it is in, and one line for every iteration that is done."""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from ppo_lightning.metrics import IterationStats, StepStats


class StageProgress(ProgressBar):
    """Name the stage of the run (rollout, reward, …) and tell the result of each iteration.

    On a terminal a bar shows the stage and the minibatches of the update; everywhere each finished
    iteration leaves one line with score, KL and speed, so that a log file stays readable.

    Args:
        live: Whether to draw the bar; None does so on a terminal.
    """

    def __init__(self, live: bool | None = None) -> None:
        super().__init__()
        self.live = sys.stderr.isatty() if live is None else live
        self._enabled = True
        self._bar: Any = None
        self._head = ""
        self._stage = ""
        self._result = ""
        self._started = self._seconds = 0.0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print beside the bar, not through it."""
        if self._enabled:
            text = kwargs.get("sep", " ").join(str(arg) for arg in args)
            Tqdm.write(text, file=kwargs.get("file") or sys.stderr, end=kwargs.get("end", "\n"))

    # ------------------------------------------------------------------ training

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        unit = "epoch" if hasattr(pl_module, "steps_done") else "iteration"
        self._head, self._stage = f"{unit} {_count(trainer)}", ""
        self._begin(int(trainer.num_training_batches))

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._advance(batch_idx + 1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def on_stage_start(self, trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
        """Show the stage that begins; called by the module."""
        self._stage = name
        self._started = time.perf_counter()
        self._show()

    def on_stage_end(self, trainer: pl.Trainer, module: pl.LightningModule, name: str) -> None:
        """Take the time of the rollout; called by the module."""
        if name == "rollout":
            self._seconds = time.perf_counter() - self._started

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, collected: Any
    ) -> None:
        """Show what the fresh buffer looks like on this rank; called by the module."""
        if self._bar is None:
            return
        experience = collected.experience
        kl = (experience.old_logprobs - experience.ref_logprobs).sum(1).mean()
        tokens = int(experience.sequences.response_mask.sum())
        score = collected.result.scores.mean()
        self._result = (
            f"score {_short(float(score))}, KL {_short(float(kl))}, "
            f"{tokens / self._seconds:.0f} tokens/s"
        )
        self._show()

    def on_iteration_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, stats: IterationStats
    ) -> None:
        """Leave a line about the finished iteration; called by the module."""
        self.print(f"iteration {_count(trainer)}: {', '.join(result_parts(stats))}")

    def on_step_stats(
        self, trainer: pl.Trainer, module: pl.LightningModule, stats: StepStats
    ) -> None:
        """Show a row of a supervised run, and leave a line when an epoch or a validation ends."""
        parts = ", ".join(step_parts(stats))
        if stats.val_loss is None:
            self._result = parts
            self._show()
        if stats.val_loss is not None or trainer.is_last_batch:
            self.print(f"step {stats.step}: {parts}")

    # ------------------------------------------------------------------ held-out prompts

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._begin_alone("validate", trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_alone("test", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_alone("predict", trainer.num_predict_batches)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            self._advance(batch_idx + 1)

    @override
    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._advance(batch_idx + 1)

    on_test_batch_end = on_predict_batch_end

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._close()

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    # ------------------------------------------------------------------ the bar

    def _begin_alone(self, name: str, batches: Any) -> None:
        self._head, self._stage, self._result = name, "", ""
        counts = batches if isinstance(batches, list) else [batches]
        self._begin(int(sum(counts)))

    def _begin(self, total: int) -> None:
        if not (self._enabled and self.live):
            return
        if self._bar is None:
            options = {"leave": False, "dynamic_ncols": True, "smoothing": 0}
            self._bar = Tqdm(total=total, desc=self._head, file=sys.stderr, **options)
        self._bar.reset(total=total)
        self._show()

    def _advance(self, done: int) -> None:
        if self._bar is not None:
            self._bar.n = done
            self._bar.refresh()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_description(f"{self._head} {self._stage}".strip(), refresh=False)
            self._bar.set_postfix_str(self._result)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def result_parts(stats: IterationStats) -> list[str]:
    """Return what is worth a glance after an iteration, score and KL first."""
    parts = {
        "score": stats.score_mean,
        "KL": stats.kl_ref,
        "length": stats.response_length_mean,
    }
    shown = [f"{name} {_short(value)}" for name, value in parts.items() if value is not None]
    held_out = stats.val_greedy or stats.val_sampled
    if held_out is not None and held_out.score is not None:
        gold = "" if held_out.gold is None else f" (gold {_short(held_out.gold)})"
        shown.append(f"held-out score {_short(held_out.score)}{gold}")
    if stats.rollout_tokens_per_second is not None:
        shown.append(f"{stats.rollout_tokens_per_second:.0f} tokens/s")
    if stats.iteration_seconds is not None:
        shown.append(f"{stats.iteration_seconds:.1f} s")
    return shown


def step_parts(stats: StepStats) -> list[str]:
    """Return what is worth a glance in a row of a supervised run."""
    names = {
        "train/loss": "loss",
        "train/accuracy": "accuracy",
        "val/loss": "held-out loss",
        "val/perplexity": "perplexity",
        "val/accuracy": "accuracy",
        "time/examples_per_second": "examples/s",
    }
    logged = stats.to_log()
    return [f"{names[name]} {_short(logged[name])}" for name in names if name in logged]


def _count(trainer: pl.Trainer) -> str:
    """Number of the iteration from 1, and how many there will be."""
    total = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"
    return f"{trainer.current_epoch + 1}{total}"


def _short(number: float) -> str:
    return f"{number:.3g}"
