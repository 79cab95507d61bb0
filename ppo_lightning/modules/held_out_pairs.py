"""Held-out pairs with what a reward model says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ppo_lightning.data.preferences.pair_batches import PairExample


class HeldOutPair(NamedTuple):
    """A held-out pair with its scores; plain values, which ranks can exchange.

    Attributes:
        number: Place in the set.
        chosen: Score.
        rejected: Score.
        margin: By how much the chosen answer should win.
        chosen_length: Tokens of the answer.
        rejected_length: Tokens of the answer.
        origin: Where the pair was read.
        texts: The last question, the chosen and the rejected answer.
    """

    number: int
    chosen: float
    rejected: float
    margin: float
    chosen_length: int
    rejected_length: int
    origin: str
    texts: tuple[str, str, str]

    @property
    def gap(self) -> float:
        """Score of the chosen answer minus that of the rejected one."""
        return self.chosen - self.rejected


def score_rows(examples: Sequence[PairExample]) -> list[tuple[int, ...]]:
    """Return what is to be scored: of each pair the chosen and its first rejected answer."""
    return [row for example in examples for row in (example.chosen, example.rejected[0])]


def held_out_pairs(
    examples: Sequence[PairExample], scores: Tensor, *, use_margin: bool
) -> list[HeldOutPair]:
    """Put pairs of one rejected answer each and their scores together.

    Args:
        examples: The pairs.
        scores: Of ``score_rows``. ``[2 * len(examples)]`` float.
        use_margin: Whether their margins count; otherwise they are 0.
    """
    return [
        HeldOutPair(
            number=example.number,
            chosen=chosen,
            rejected=rejected,
            margin=example.margin if use_margin else 0.0,
            chosen_length=example.chosen_length,
            rejected_length=example.rejected_lengths[0],
            origin=example.pair.origin,
            texts=_texts(example),
        )
        for example, (chosen, rejected) in zip(
            examples, scores.double().view(-1, 2).tolist(), strict=True
        )
    ]


def pair_records(pairs: Iterable[HeldOutPair]) -> list[dict[str, Any]]:
    """Return a plain dictionary for each pair, in the order of the set."""
    return [pair_record(pair) for pair in sorted(pairs)]


def pair_record(pair: HeldOutPair) -> dict[str, Any]:
    """Return a pair with its scores as a plain dictionary."""
    prompt, chosen, rejected = pair.texts
    return {
        "origin": pair.origin,
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "chosen_score": pair.chosen,
        "rejected_score": pair.rejected,
        "margin": pair.margin,
    }


def _texts(example: PairExample) -> tuple[str, str, str]:
    prompt = example.pair.prompt
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return asked, example.pair.chosen[-1]["content"], example.pair.rejected[0][-1]["content"]
