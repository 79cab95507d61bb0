"""Answers to held-out prompts, the policy's beside the reference's, for reading."""

from __future__ import annotations

import html
import re
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

_NUMBERS = (
    *(("score", "score"), ("parts", "components"), ("gold", "gold")),
    *(("KL", "kl_ref"), ("tokens", "num_tokens")),
)
"""Titles of the table's columns beside the texts, and what of the policy's answer is in them."""

_MARKDOWN = re.compile(r"[|\\`*_~\[\]!]")  # what makes columns, code, emphasis, links and pictures
_LINE_END = re.compile(r"\r\n|\r|\n")


class SampleTexts(pl.Callback):
    """Keep the answers to the first held-out prompts after each validation.

    Each has its score, the parts of it if there are several, gold score, KL to the reference and
    length. They go to ``samples/iteration_0003.jsonl`` in the run's folder, a line a pair, and as
    text to TensorBoard if that is a logger of the run. How many prompts: ``validation.num_texts``;
    how often: the Trainer's ``check_val_every_n_epoch``.
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
    head = ["prompt", "policy", "reference", *(title for title, _ in _NUMBERS)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        texts = [row["prompt"], row.get("policy", ""), row.get("reference", "")]
        numbers = [_shown(row.get(f"policy_{name}")) for _, name in _NUMBERS]
        lines.append(f"| {' | '.join(map(_cell, [*texts, *numbers]))} |")
    return "\n".join(lines)


def _shown(number: float | dict[str, float] | None) -> str:
    if isinstance(number, dict):
        return ", ".join(f"{name} {value:.3g}" for name, value in number.items())
    return "" if number is None else f"{number:.3g}"


def _columns(writer: str, answer: Answer | None) -> dict[str, Any]:
    if answer is None:
        return {}
    numbers = {name: getattr(answer, name) for name in ("score", "gold", "kl_ref")}
    known = {f"{writer}_{name}": value for name, value in numbers.items() if value is not None}
    if len(answer.components) > 1:
        known[f"{writer}_components"] = dict(answer.components)
    return {writer: answer.response, **known, f"{writer}_num_tokens": answer.num_tokens}


def _cell(text: str) -> str:
    """Keep a text in its cell, as it is, whatever signs of Markdown or HTML are in it."""
    escaped = _MARKDOWN.sub(lambda sign: f"&#{ord(sign[0])};", html.escape(text))
    return _LINE_END.sub("<br>", escaped)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    set_aside(path)
    write_text_atomic(path, as_jsonl(rows))
