"""Answers of a supervised policy to held-out prompts, for reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import as_jsonl, set_aside, write_text_atomic
from ppo_lightning.modules.metrics_file import run_folder


@dataclass(frozen=True, kw_only=True)
class WrittenAnswer:
    """One answer, without any score.

    Args:
        number: Number of the prompt.
        prompt: The prompt as given.
        response: What the policy wrote, likeliest token by likeliest token.
        demonstrated: What the demonstration says.
        num_tokens: Tokens of the answer, end token included.
        truncated: Whether it stopped at the length limit.
    """

    number: int
    prompt: str
    response: str
    demonstrated: str
    num_tokens: int
    truncated: bool

    def to(self, *_: Any, **__: Any) -> WrittenAnswer:
        """Return itself: it holds no tensors, and Lightning moves what ``predict_step`` returns."""
        return self


class WrittenAnswers(pl.Callback):
    """Write answers as JSONL into the run's folder.

    Those of a validation go to ``samples/step_000120.jsonl``, those of ``predict`` to
    ``predictions.jsonl``. ``SFTModule`` adds it to every run.
    """

    def __init__(self) -> None:
        self._predicted: list[WrittenAnswer] = []
        self._folder = Path()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder, self._predicted = run_folder(trainer), []

    def on_written_answers(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, answers: Sequence[WrittenAnswer]
    ) -> None:
        """Write the answers of a validation; called by the module on all ranks."""
        command = getattr(trainer.state.fn, "value", "fit")
        steps = getattr(pl_module, "steps_done", 0)
        name = f"step_{steps:06d}" if command == "fit" else command
        self._write(trainer, self._folder / "samples" / f"{name}.jsonl", answers)

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
        self._predicted += [a for a in outputs or () if isinstance(a, WrittenAnswer)]

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = self._folder / "predictions.jsonl"
        number = self._write(trainer, path, self._predicted)
        rank_zero_info(f"{number} predictions written to {path}")

    @staticmethod
    def _write(trainer: pl.Trainer, path: Path, answers: Sequence[WrittenAnswer]) -> int:
        found = gather_objects(answers)
        if trainer.is_global_zero and found:
            set_aside(path)
            write_text_atomic(path, as_lines(found))
        return len(found)


def as_lines(answers: Iterable[WrittenAnswer]) -> str:
    """Return the answers as JSONL, by number of the prompt."""
    ordered = sorted(answers, key=lambda answer: answer.number)
    return as_jsonl(map(asdict, ordered))
