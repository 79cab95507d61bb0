"""Examples side by side in rows: one each and padded, or several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_lightning.data.demonstrations.learned import Example
from ppo_lightning.types import TensorRecord

__all__ = ["TokenRows", "packed_rows", "padded_rows", "row_groups", "token_rows"]

Rows = list[list[int]]
"""Numbers of the examples in each row."""


@dataclass(frozen=True, kw_only=True)
class TokenRows(TensorRecord):
    """What one forward pass of supervised training reads.

    Args:
        ids: Token ids, 0 where there is none. ``[B, S]`` long.
        learned: True on the tokens whose log-probability counts. ``[B, S]`` bool.
        segments: Number of the example within its row, from 1; 0 where there is no token.
            ``[B, S]`` long.
        positions: Place of a token within its example. ``[B, S]`` long.
        packed: Whether a row may hold several examples.
    """

    ids: Tensor
    learned: Tensor
    segments: Tensor
    positions: Tensor
    packed: bool = False

    def __len__(self) -> int:
        return self.ids.shape[0]


def padded_rows(examples: Sequence[Example]) -> Rows:
    """Give each example a row, longest first."""
    return [[number] for number in _longest_first(examples)]


def packed_rows(examples: Sequence[Example]) -> Rows:
    """Fill rows no longer than the longest example: longest first, each in the first that fits."""
    rows: Rows = []
    room: list[int] = []
    width = max(map(len, examples), default=0)
    for number in _longest_first(examples):
        size = len(examples[number])
        place = next((i for i, left in enumerate(room) if left >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(width)
        rows[place].append(number)
        room[place] -= size
    return rows


def row_groups(rows: Rows, examples: Sequence[Example], max_tokens: int | None) -> list[Rows]:
    """Cut rows into groups, so that none computes more than ``max_tokens``, padding included.

    Args:
        rows: Of ``padded_rows`` or ``packed_rows``.
        examples: The examples.
        max_tokens: None makes one group. A longer row is a group of its own.

    Returns:
        Groups of rows of similar length; none for no row.
    """
    sizes = [sum(len(examples[number]) for number in row) for row in rows]
    groups: list[Rows] = []
    width = 0
    for place in sorted(range(len(rows)), key=lambda place: -sizes[place]):
        fits = max_tokens is None or (groups and (len(groups[-1]) + 1) * width <= max_tokens)
        if groups and fits:
            groups[-1].append(rows[place])
        else:
            groups.append([rows[place]])
            width = sizes[place]  # the longest of the group comes first
    return groups


def token_rows(rows: Rows, examples: Sequence[Example], *, packed: bool) -> TokenRows:
    """Lay examples out in tensors, padded on the right.

    Args:
        rows: Numbers of the examples in each row, at least one row.
        examples: The examples.
        packed: Whether a row may hold several.
    """
    width = max(sum(len(examples[number]) for number in row) for row in rows)
    ids, segments, positions = torch.zeros(3, len(rows), width, dtype=torch.long)
    learned = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        start = 0
        for segment, example in enumerate((examples[number] for number in row), start=1):
            stop = start + len(example)
            ids[place, start:stop] = torch.tensor(example.ids.tolist())
            segments[place, start:stop] = segment
            positions[place, start:stop] = torch.arange(len(example))
            for first, last in example.spans:
                learned[place, start + first : start + last] = True
            start = stop
    return TokenRows(
        ids=ids, learned=learned, segments=segments, positions=positions, packed=packed
    )


def _longest_first(examples: Sequence[Example]) -> list[int]:
    return sorted(range(len(examples)), key=lambda number: -len(examples[number]))
