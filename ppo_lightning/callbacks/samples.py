"""Answers to held-out prompts, the policy's beside the reference's, for reading."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from ppo_lightning.distributed import gather_objects
from ppo_lightning.io import as_jsonl, set_aside, write_text_atomic
from ppo_lightning.modules import Answer
from ppo_lightning.modules.metrics_file import run_folder


class SampleTexts(pl.Callback):
    """Keep the answers to the first held-out prompts after each validation.

    They go to ``samples/iteration_0003.jsonl`` in the run's folder, a line a pair, and as text to
    TensorBoard if that is a logger of the run. How many prompts: ``validation.num_texts``.
    """

    def __init__(self) -> None:
        self._folder = Path()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer) / "samples"

    def on_answers(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, answers: Sequence[Answer]
    ) -> None:
        """Write the answers of one validation; called by the module on all ranks."""
        trial_run: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
        validation: Any = getattr(pl_module, "validation", None)
        most = getattr(validation, "num_texts", 0)
        if trainer.sanity_checking or trial_run or most == 0:
            return
        kept = gather_objects([answer for answer in answers if answer.number < most])
        if not trainer.is_global_zero:
            return
        iteration = trainer.current_epoch
        command = getattr(trainer.state.fn, "value", "fit")
        fitting = command == "fit"
        rows = side_by_side(kept, iteration=iteration if fitting else None)
        name = f"iteration_{iteration:04d}" if fitting else command
        _write(self._folder / f"{name}.jsonl", rows)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", as_markdown(rows), global_step=iteration)


def side_by_side(answers: Iterable[Answer], *, iteration: int | None) -> list[dict[str, Any]]:
    """Pair the policy's answers with the reference's of the same prompt and mode.

    Args:
        answers: Of both, in any order; several sampled answers to a prompt keep their order.
        iteration: Stands in every row; None leaves it out.

    Returns:
        A plain dictionary for each pair, by number of the prompt.
    """
    by_place: dict[tuple[int, str], dict[str, list[Answer]]] = defaultdict(
        lambda: {"policy": [], "reference": []}
    )
    for answer in answers:
        by_place[answer.number, answer.mode][answer.writer].append(answer)
    rows = []
    for (number, mode), writers in sorted(by_place.items()):
        for policy, reference in zip_longest(writers["policy"], writers["reference"]):
            either = policy or reference
            row: dict[str, Any] = {} if iteration is None else {"iteration": iteration}
            row |= {"number": number, "mode": mode, "prompt": either.prompt}
            row |= {} if either.messages is None else {"messages": list(either.messages)}
            rows.append(row | _columns("policy", policy) | _columns("reference", reference))
    return rows


def as_markdown(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, which TensorBoard shows."""
    lines = ["| prompt | policy | reference | score | KL |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = [row["prompt"], row.get("policy", ""), row.get("reference", "")]
        numbers = [row.get("policy_score"), row.get("policy_kl_ref")]
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        lines.append(f"| {' | '.join([*map(_cell, cells), *shown])} |")
    return "\n".join(lines)


def _columns(writer: str, answer: Answer | None) -> dict[str, Any]:
    if answer is None:
        return {}
    numbers = {"score": answer.score, "gold": answer.gold, "kl_ref": answer.kl_ref}
    known = {f"{writer}_{name}": value for name, value in numbers.items() if value is not None}
    return {writer: answer.response, **known}


def _cell(text: str) -> str:
    """Keep a text in its cell, whatever signs of Markdown or HTML are in it."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    set_aside(path)
    write_text_atomic(path, as_jsonl(rows))
