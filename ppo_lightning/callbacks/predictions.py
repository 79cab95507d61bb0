"""``predictions.jsonl``: what ``predict`` was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ppo_lightning.modules import Answer
from ppo_lightning.modules.written import PredictionFile


class PredictionWriter(PredictionFile):
    """Write every answer of ``predict`` as one line: prompt, response, scores, KL.

    The file appears when all are there, in the order of the prompts; an earlier one is kept under
    another name.

    Args:
        path: None takes ``predictions.jsonl`` in the run's folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(Answer, prediction_records, path)


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
