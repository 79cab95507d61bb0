"""What a run has changed, said at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from ppo_lightning.callbacks.comparison import (
    Change,
    Pairs,
    changes_of,
    changes_table,
    count_of,
    pair_answers,
    texts_of,
)
from ppo_lightning.callbacks.samples import as_markdown, side_by_side
from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import finite, set_aside, write_json_atomic, write_text_atomic
from ppo_lightning.modules import Answer
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.modules.reporting import memory_gib


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run has changed, and what it took.

    Args:
        iterations: Done when the answers were given.
        compared: What was compared, in words.
        changes: By name.
        texts: Answers side by side, one pair a prompt.
        seconds: Wall time of ``fit``, from its set-up on.
        cpu_seconds: Processor time of all threads meanwhile.
        memory_gib: Peak memory of the device, or of the process on a CPU.
    """

    iterations: int
    compared: str
    changes: dict[str, Change]
    texts: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float
    memory_gib: float

    def head(self) -> str:
        """Title, table and cost, as Markdown that is fit for a terminal."""
        cost = (
            f"peak memory {self.memory_gib:.2f} GiB, wall time {self.seconds:.0f} s, "
            f"processor time {self.cpu_seconds:.0f} s"
        )
        title = (
            f"After {self.iterations} iterations; {self.compared}, reference before, policy after"
        )
        return f"{title}\n\n{changes_table(self.changes)}\n\n{cost}\n"

    def record(self) -> dict[str, Any]:
        """Return plain dictionaries and numbers for JSON."""
        gains = {name: {"gain": change.gain} for name, change in self.changes.items()}
        changes = {name: asdict(change) | gains[name] for name, change in self.changes.items()}
        record: dict[str, Any] = finite(asdict(self) | {"changes": changes})
        return record


class BeforeAfter(pl.Callback):
    """Print a table of what the run has changed, and some texts, when ``fit`` ends.

    It compares the answers of the run's last validation: those of the reference, where the policy
    began, are "before", the policy's are "after". Sampled answers are taken if there are any, else
    greedy ones. ``summary.md`` and ``summary.json`` in the run's folder hold the same. How many
    prompts are shown with their answers: ``validation.num_texts``.

    The last of the Trainer's ``max_epochs`` is validated whatever ``check_val_every_n_epoch`` says,
    so the table is about the run's end. A run that something else has stopped is compared as it was
    at its last validation; where there was none, a warning takes the place of the table.
    """

    def __init__(self) -> None:
        self._answers: Sequence[Answer] = ()
        self._iterations = 0
        self._began = (0.0, 0.0)
        self._every_n: int | None = None  # the Trainer's own, while the last iteration runs

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._answers = ()
        self._began = (time.perf_counter(), time.process_time())

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            self._every_n, trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch, 1

    def on_answers(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, answers: Sequence[Answer]
    ) -> None:
        """Keep the answers of a validation; called by the module on all ranks."""
        if not trainer.sanity_checking:
            self._answers, self._iterations = list(answers), trainer.current_epoch + 1

    def on_iteration_end(self, trainer: pl.Trainer, module: Any, stats: Any) -> None:
        """Forget the answers of a policy that was undone; called by the module on all ranks."""
        if getattr(module, "went_back", False):
            self._answers = ()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._give_back(trainer)
        folder, pairs = run_folder(trainer), pair_answers(gather_objects(list(self._answers)))
        if not pairs:
            rank_zero_warn(_nothing_to_compare(trainer))
        if not trainer.is_global_zero or not pairs:
            return
        summary = self._summary(pairs, pl_module)
        print(f"\n{summary.head()}\n{texts_of(summary.texts)}")
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        if not trial_run:
            _write(folder / "summary.md", folder / "summary.json", summary)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._give_back(trainer)

    def _give_back(self, trainer: pl.Trainer) -> None:
        """Set the Trainer's ``check_val_every_n_epoch`` back to what the user gave."""
        if self._every_n is not None:
            trainer.check_val_every_n_epoch, self._every_n = self._every_n, None

    def _summary(self, pairs: Pairs, module: pl.LightningModule) -> Summary:
        validation: Any = getattr(module, "validation", None)
        first = list(pairs.values())[: getattr(validation, "num_texts", 0)]
        shown = [answers[0] for pair in first for answers in pair]
        return Summary(
            iterations=self._iterations,
            compared=count_of(pairs),
            changes=changes_of(pairs),
            texts=side_by_side(shown, iteration=None),
            seconds=time.perf_counter() - self._began[0],
            cpu_seconds=time.process_time() - self._began[1],
            memory_gib=memory_gib(module.device),
        )


def _nothing_to_compare(trainer: pl.Trainer) -> str:
    return (
        "BeforeAfter has no table to show: no held-out prompt was answered in this run. Give some "
        "as `data.init_args.val_prompts`; if there are some, the run ended before its first "
        "validation: lower `trainer.check_val_every_n_epoch`, which is "
        f"{trainer.check_val_every_n_epoch}."
    )


def _write(text: Path, record: Path, summary: Summary) -> None:
    for path in (text, record):
        set_aside(path)
    write_text_atomic(text, f"{summary.head()}\n{as_markdown(summary.texts)}\n")
    write_json_atomic(record, summary.record())
