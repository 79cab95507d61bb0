"""Tokenised pairs, and the tensors that a forward pass takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.data.preferences.pairs import PreferencePair

__all__ = ["PairBatch", "PairExample", "PairPart", "idle_pair_part", "pair_parts", "row_batches"]

Row = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PairExample:
    """A pair as a reward model reads it: prompt and answer in one row.

    Args:
        number: Place in its set.
        chosen: Token ids of the better one.
        rejected: Token ids of each worse one.
        chosen_length: Tokens of the answer alone.
        rejected_lengths: Tokens of each answer alone.
        pair: The texts.
    """

    number: int
    chosen: Row
    rejected: tuple[Row, ...]
    chosen_length: int
    rejected_lengths: tuple[int, ...]
    pair: PreferencePair

    @property
    def margin(self) -> float:
        """By how much the better one should win."""
        return self.pair.margin

    @property
    def width(self) -> int:
        """Tokens of its longest row."""
        return max(map(len, (self.chosen, *self.rejected)))

    def against(self, which: int) -> PairExample:
        """Return the pair with one of its rejected answers."""
        return replace(
            self,
            rejected=(self.rejected[which],),
            rejected_lengths=(self.rejected_lengths[which],),
            pair=replace(self.pair, rejected=(self.pair.rejected[which],)),
        )


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """This rank's pairs of one optimiser step, or of one piece of a validation.

    Args:
        examples: Maybe none.
        epoch: Passes over the pairs before this one.
        step: Number of the step in the epoch.
        num_steps: Steps of the epoch.
    """

    examples: tuple[PairExample, ...]
    epoch: int
    step: int
    num_steps: int

    def __len__(self) -> int:
        return len(self.examples)

    def to(self, device: Any, non_blocking: bool = False) -> PairBatch:
        """Return itself: tensors are made where they are needed, from rows of unlike length."""
        return self


@dataclass(frozen=True, kw_only=True)
class PairPart:
    """Some pairs for one forward pass: a pair's two rows are always together.

    Args:
        input_ids: Chosen answers first, then rejected ones, padded on the right. ``[2N, S]`` long.
        attention_mask: 1 on real tokens. ``[2N, S]`` long.
        margins: ``[N]`` float32.
        counts: Whether a pair is to be learned from. ``[N]`` bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    margins: Tensor
    counts: Tensor


def pair_parts(
    examples: Sequence[PairExample], *, max_tokens: int | None, device: torch.device
) -> list[PairPart]:
    """Cut pairs into forward passes, those of like length together.

    Args:
        examples: With one rejected answer each.
        max_tokens: Most tokens of a pass, padding included; a longer pair goes alone. None is one
            pass.
        device: Of the tensors.
    """
    widths = [example.width for example in examples]
    groups = _groups(widths, max_tokens, rows_each=2)
    return [_part([examples[number] for number in group], device) for group in groups]


def idle_pair_part(device: torch.device) -> PairPart:
    """Return a part that is read and counts nowhere."""
    ones = torch.ones((2, 1), dtype=torch.long, device=device)
    return PairPart(
        input_ids=torch.zeros_like(ones),
        attention_mask=ones,
        margins=torch.zeros(1, device=device),
        counts=torch.zeros(1, dtype=torch.bool, device=device),
    )


def row_batches(
    rows: Sequence[Row], *, max_tokens: int | None, device: torch.device
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Cut rows into forward passes, those of like length together.

    Args:
        rows: Token ids, none empty.
        max_tokens: As in ``pair_parts``.
        device: Of the tensors.

    Yields:
        ``(numbers, input_ids, attention_mask)``: which rows they are, and two ``[N, S]`` long.
    """
    for numbers in _groups([len(row) for row in rows], max_tokens, rows_each=1):
        yield numbers, *_right_pad([rows[number] for number in numbers], device)


def _part(examples: Sequence[PairExample], device: torch.device) -> PairPart:
    rows = [e.chosen for e in examples] + [e.rejected[0] for e in examples]
    ids, mask = _right_pad(rows, device)
    margins = torch.tensor([e.margin for e in examples], dtype=torch.float32, device=device)
    counts = torch.ones(len(examples), dtype=torch.bool, device=device)
    return PairPart(input_ids=ids, attention_mask=mask, margins=margins, counts=counts)


def _groups(widths: Sequence[int], max_tokens: int | None, *, rows_each: int) -> list[list[int]]:
    """Put numbers of like width together, as many as the budget allows."""
    groups: list[list[int]] = []
    for number in sorted(range(len(widths)), key=lambda i: (widths[i], i)):
        size = len(groups[-1]) + 1 if groups else 1
        padded = widths[number] * size * rows_each  # it is the widest so far
        if not groups or (max_tokens is not None and padded > max_tokens):
            groups.append([])
        groups[-1].append(number)
    return groups


def _right_pad(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = [[*row, *[0] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
