"""``predictions.jsonl``: what ``predict`` was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import as_jsonl, set_aside, write_text_atomic
from ppo_lightning.modules import Answer
from ppo_lightning.modules.metrics_file import run_folder


class PredictionWriter(pl.Callback):
    """Write every answer of ``predict`` as one line: prompt, response, scores, KL.

    The file appears when all are there, in the order of the prompts; an earlier one is kept under
    another name.

    Args:
        path: None takes ``predictions.jsonl`` in the run's folder.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._answers: list[Answer] = []

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._answers = []

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
        self._answers += [answer for answer in outputs or () if isinstance(answer, Answer)]

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = run_folder(trainer)
        answers = gather_objects(self._answers)
        if not trainer.is_global_zero or not answers:
            return
        path = folder / "predictions.jsonl" if self.path is None else Path(self.path)
        set_aside(path)
        write_text_atomic(path, as_jsonl(prediction_records(answers)))
        rank_zero_info(f"{len(answers)} predictions written to {path}")


def prediction_records(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Return a plain dictionary for each answer, by number of the prompt."""
    return [
        {
            "number": answer.number,
            "mode": answer.mode,
            "prompt": answer.prompt,
            **({} if answer.messages is None else {"messages": list(answer.messages)}),
            "response": answer.response,
            "score": answer.score,
            "rewards": dict(answer.components),
            "gold": answer.gold,
            "kl_ref": answer.kl_ref,
            "num_tokens": answer.num_tokens,
            "truncated": answer.truncated,
        }
        for answer in sorted(answers, key=lambda answer: (answer.number, answer.mode))
    ]
