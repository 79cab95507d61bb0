"""Files of answers: what ``predict`` was asked for, and what a policy wrote on the way, to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import as_jsonl, set_aside, write_text_atomic
from ppo_lightning.modules.metrics_file import run_folder

Item = TypeVar("Item")
Records = Callable[[list[Any]], Iterable[Mapping[str, Any]]]
"""Makes of all ranks' items a plain dictionary each, in the order of the file."""


def write_gathered(
    trainer: pl.Trainer, path: Path, items: Sequence[Item], records: Records
) -> list[Item]:
    """Write the items of all ranks as JSONL, if there are any; an earlier file is set aside.

    Args:
        trainer: Calls this on all ranks.
        path: Of the file.
        items: This rank's.
        records: Makes the lines.

    Returns:
        Those of all ranks.
    """
    found = gather_objects(items)
    if trainer.is_global_zero and found:
        set_aside(path)
        write_text_atomic(path, as_jsonl(records(found)))
    return found


class PredictionFile(pl.Callback):
    """Write what ``predict_step`` returns, when all is there.

    Args:
        kind: Class of what is written; whatever else ``predict_step`` returns is left out.
        records: Makes the lines.
        path: None takes ``predictions.jsonl`` in the run's folder.
    """

    def __init__(self, kind: type, records: Records, path: str | None = None) -> None:
        self.kind = kind
        self.records = records
        self.path = path
        self._predicted: list[Any] = []

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._predicted = []

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
        self._predicted += [item for item in outputs or () if isinstance(item, self.kind)]

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = run_folder(trainer)
        path = folder / "predictions.jsonl" if self.path is None else Path(self.path)
        if found := write_gathered(trainer, path, self._predicted, self.records):
            rank_zero_info(f"{len(found)} predictions written to {path}")
        self._predicted = []


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


class WrittenAnswers(PredictionFile):
    """Write answers as JSONL into the run's folder.

    Those of a validation go to ``samples/step_000120.jsonl``, those of ``predict`` to
    ``predictions.jsonl``. ``SFTModule`` adds it to every run.
    """

    def __init__(self) -> None:
        super().__init__(WrittenAnswer, answer_records)

    def on_written_answers(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, answers: Sequence[WrittenAnswer]
    ) -> None:
        """Write the answers of a validation; called by the module on all ranks."""
        command = getattr(trainer.state.fn, "value", "fit")
        steps = getattr(pl_module, "steps_done", 0)
        name = f"step_{steps:06d}" if command == "fit" else command
        path = run_folder(trainer) / "samples" / f"{name}.jsonl"
        write_gathered(trainer, path, answers, answer_records)


def answer_records(answers: Iterable[WrittenAnswer]) -> list[dict[str, Any]]:
    """Return a plain dictionary for each answer, by number of the prompt."""
    return [asdict(answer) for answer in sorted(answers, key=lambda answer: answer.number)]
