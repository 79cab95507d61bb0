"""How a buffer is cut: into minibatches by chance, into microbatches by a budget of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lightning.types import Sequences


def minibatch_rows(
    indices: Tensor, *, num_responses: int, num_minibatches: int, key: int
) -> list[Tensor]:
    """Shuffle the whole buffer and cut it; every rank gets its own rows of each piece.

    The shuffle is over the numbers of all ranks' responses, so the pieces are the same whatever
    the number of ranks. Sizes differ by one response at most.

    Args:
        indices: Numbers of this rank's responses. ``[B]`` long.
        num_responses: Responses over all ranks.
        num_minibatches: Pieces.
        key: Seed of the shuffle.

    Returns:
        Row numbers for each piece, ``[N_i]`` long; a piece may hold no row of this rank.
    """
    generator = torch.Generator().manual_seed(key)
    order = torch.randperm(num_responses, generator=generator)
    row_of = torch.full((num_responses,), -1)
    row_of[indices.cpu()] = torch.arange(len(indices))
    pieces = [row_of[piece] for piece in order.tensor_split(num_minibatches)]
    return [rows[rows >= 0] for rows in pieces]


def microbatch_rows(
    sequences: Sequences, *, max_tokens: int | None, packed: bool = False
) -> list[Tensor]:
    """Group rows of similar length so that no group computes more than ``max_tokens``.

    Args:
        sequences: The rows; may be none.
        max_tokens: Most tokens in a group; None makes one group. A row longer than that is a group
            of its own.
        packed: Padding is not computed, so it does not count.

    Returns:
        Row numbers for each group, ``[N_i]`` long; no group for no row.
    """
    if len(sequences) == 0:
        return []
    if max_tokens is None:
        return [torch.arange(len(sequences))]
    prompts, lengths = sequences.prompt_mask.sum(1), sequences.attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    parts = zip(prompts[order].tolist(), (lengths - prompts)[order].tolist(), strict=True)
    groups: list[list[int]] = []
    size = _Size()
    for row, (prompt, response) in zip(order.tolist(), parts, strict=True):
        size = size.grown(prompt, response)
        if groups and size.num_tokens(packed) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            size = _Size().grown(prompt, response)
    return [torch.tensor(group) for group in groups]


class _Size(NamedTuple):
    """How large a group of rows is."""

    rows: int = 0
    prompt: int = 0
    response: int = 0
    real: int = 0

    def grown(self, prompt: int, response: int) -> _Size:
        """With one more row."""
        longest = max(self.prompt, prompt), max(self.response, response)
        return _Size(self.rows + 1, *longest, self.real + prompt + response)

    def num_tokens(self, packed: bool) -> int:
        """Tokens that a pass computes: the real ones, or a grid of the longest parts."""
        return self.real if packed else self.rows * (self.prompt + self.response)
