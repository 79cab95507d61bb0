"""Scores for reading: their distribution, and the best and worst texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import finite, set_aside, write_json_atomic
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.rewards import distribution, histogram

_MAX_CHARS = 4000


class ScoreReport(pl.Callback):
    """Keep how the scores of a buffer are distributed, and its best and worst responses.

    ``rewards/iteration_0003.json`` in the run's folder has moments, quantiles and a histogram of
    the raw scores and of every component, over all ranks, and the texts at both ends with what each
    component said of them; TensorBoard, if that is a logger of the run, gets the histogram.
    ``PPOModule`` adds it to every run; a run that goes on writes the iterations that come again
    anew, a new run leaves an earlier one's folder under another name.

    Args:
        every_n_iterations: Buffers between are not written; 0 writes none.
        num_texts: Best and worst responses, so many of each.
        keep: Files of the latest so many iterations are kept.
    """

    def __init__(self, every_n_iterations: int = 5, num_texts: int = 5, keep: int = 100) -> None:
        require_at_least("every_n_iterations", every_n_iterations, 0)
        require_at_least("num_texts", num_texts, 0)
        require_at_least("keep", keep, 1)
        self.every_n_iterations = every_n_iterations
        self.num_texts = num_texts
        self.keep = keep
        self._folder = Path()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._folder = run_folder(trainer) / "rewards"
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        on = self.every_n_iterations and not trial_run and trainer.is_global_zero
        if on and trainer.current_epoch == 0:
            set_aside(self._folder)

    def on_rollout_end(self, trainer: Any, pl_module: Any, collected: Collected) -> None:
        """Write the buffer that was just made; called by the module on all ranks."""
        iteration = collected.experience.iteration
        if not self.every_n_iterations or trainer.fast_dev_run:
            return
        if iteration % self.every_n_iterations:
            return
        parts = gather_objects([_own_part(collected, self.num_texts)])
        if not trainer.is_global_zero:
            return
        report = report_of(parts, iteration=iteration, num_texts=self.num_texts)
        write_json_atomic(self._folder / f"iteration_{iteration:04d}.json", finite(report))
        for old in reports_in(self._folder)[: -self.keep]:
            with suppress(FileNotFoundError):
                old.unlink()
        self._to_tensorboard(trainer, parts, iteration)

    @staticmethod
    def _to_tensorboard(trainer: Any, parts: Sequence[Mapping[str, Any]], iteration: int) -> None:
        scores = [score for part in parts for score in part["scores"]]
        for logger in trainer.loggers if scores else ():
            if isinstance(logger, TensorBoardLogger):
                board: Any = logger.experiment
                board.add_histogram("rollout/raw_score", torch.tensor(scores), iteration)


def reports_in(folder: Path) -> list[Path]:
    """Return the files of a folder, by iteration: 10000 comes after 9999."""
    return sorted(folder.glob("iteration_*.json"), key=lambda file: (len(file.name), file.name))


def report_of(
    parts: Sequence[Mapping[str, Any]], *, iteration: int, num_texts: int
) -> dict[str, Any]:
    """Put the parts of all ranks together: the content of a file.

    Args:
        parts: ``scores`` (raw), ``components`` (scores by name) and ``texts`` (records with
            ``raw_score`` and ``number``) of each rank.
        iteration: Stands at the head.
        num_texts: From each end.
    """
    texts = [text for part in parts for text in part["texts"]]
    best = sorted(texts, key=lambda text: (-text["raw_score"], text["number"]))
    worst = sorted(texts, key=lambda text: (text["raw_score"], text["number"]))
    names = parts[0]["components"]
    scores = {name: [s for part in parts for s in part["components"][name]] for name in names}
    return {
        "iteration": iteration,
        "raw_score": _described([score for part in parts for score in part["scores"]]),
        "components": {name: _described(values) for name, values in scores.items()},
        "best": best[:num_texts],
        "worst": worst[:num_texts],
    }


def _described(scores: Sequence[float]) -> dict[str, Any]:
    bins = histogram(scores)
    return distribution(scores).as_dict() | ({"histogram": asdict(bins)} if bins else {})


def _own_part(collected: Collected, num_texts: int) -> dict[str, Any]:
    """What this rank adds; no more texts than could be among the best or worst of all ranks."""
    result = collected.result
    rows = collected.kept.cpu().nonzero().flatten().tolist()
    raw = result.raw.tolist()
    numbers = collected.rollout.prompts.indices.tolist()
    best = sorted(rows, key=lambda row: (-raw[row], numbers[row]))[:num_texts]
    worst = sorted(rows, key=lambda row: (raw[row], numbers[row]))[:num_texts]
    said = {name: scores.tolist() for name, scores in result.components.items()}
    return {
        "scores": [raw[row] for row in rows],
        "components": {name: [scores[row] for row in rows] for name, scores in said.items()},
        "texts": [_text(collected, row, said) for row in dict.fromkeys([*best, *worst])],
    }


def _text(collected: Collected, row: int, said: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    completions, result = collected.completions, collected.result
    return {
        "number": int(collected.rollout.prompts.indices[row]),
        "score": float(result.totals[row]),
        "raw_score": float(result.raw[row]),
        "components": {name: scores[row] for name, scores in said.items()},
        "num_tokens": len(completions.response_ids[row]),
        "truncated": bool(completions.truncated[row]),
        "prompt": completions.prompts[row][-_MAX_CHARS:],
        **({} if (chat := completions.messages[row]) is None else {"messages": list(chat)}),
        "response": completions.responses[row][:_MAX_CHARS],
    }
