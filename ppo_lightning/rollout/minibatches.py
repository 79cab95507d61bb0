"""How a buffer is cut: into minibatches by chance, into microbatches by a budget of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_lightning.functional import first_alike
from ppo_lightning.types import Sequences


def minibatch_rows(
    indices: Tensor, *, num_responses: int, num_minibatches: int, key: int, together: int = 1
) -> list[Tensor]:
    """Shuffle the whole buffer and cut it; every rank gets its own rows of each piece.

    The shuffle is over the numbers of all ranks' responses, so the pieces are the same whatever
    the number of ranks. Sizes differ by one response at most, or by ``together`` of them.

    Args:
        indices: Numbers of this rank's responses. ``[B]`` long.
        num_responses: Responses over all ranks.
        num_minibatches: Pieces.
        key: Seed of the shuffle.
        together: So many responses, one after the other, stay in one piece.

    Returns:
        Row numbers for each piece, ``[N_i]`` long; a piece may hold no row of this rank.
    """
    generator = torch.Generator().manual_seed(key)
    groups = torch.randperm(num_responses // together, generator=generator)
    row_of = torch.full((num_responses,), -1)
    row_of[indices.cpu()] = torch.arange(len(indices))
    members = torch.arange(together)
    numbers = [g[:, None] * together + members for g in groups.tensor_split(num_minibatches)]
    pieces = [row_of[piece.flatten()] for piece in numbers]
    return [rows[rows >= 0] for rows in pieces]


def microbatch_rows(
    sequences: Sequences, *, max_tokens: int | None, packed: bool = False
) -> list[Tensor]:
    """Group rows of similar length so that no group computes more than ``max_tokens``.

    Args:
        sequences: The rows; may be none.
        max_tokens: Most tokens in a group; None makes one group. A row longer than that is a group
            of its own.
        packed: Padding is not computed, so it does not count; nor does a prompt that comes again.

    Returns:
        Row numbers for each group, ``[N_i]`` long; no group for no row.
    """
    if len(sequences) == 0:
        return []
    if max_tokens is None:
        return [torch.arange(len(sequences))]
    prompts, lengths = sequences.prompt_mask.sum(1), sequences.attention_mask.sum(1)
    rows = torch.arange(len(sequences), device=lengths.device)
    leaders = first_alike(sequences.prompt_ids, sequences.prompt_mask) if packed else rows
    order = _longest_first(lengths, leaders)
    columns = (prompts, lengths - prompts, leaders)
    parts = zip(*(column[order].tolist() for column in columns), strict=True)
    groups: list[list[int]] = []
    size = _Size()
    for row, (prompt, response, leader) in zip(order.tolist(), parts, strict=True):
        size = size.grown(prompt, response, leader)
        if groups and size.num_tokens(packed) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            size = _Size().grown(prompt, response, leader)
    return [torch.tensor(group) for group in groups]


def _longest_first(lengths: Tensor, leaders: Tensor) -> Tensor:
    """Order rows by length, those that are led by one row beside each other. ``[B]`` long."""
    longest = torch.zeros_like(lengths).scatter_reduce(0, leaders, lengths, "amax")[leaders]
    order = leaders.argsort(stable=True)
    return order[longest[order].argsort(descending=True, stable=True)]


class _Size(NamedTuple):
    """How large a group of rows is."""

    rows: int = 0
    prompt: int = 0
    response: int = 0
    real: int = 0
    leader: int = -1

    def grown(self, prompt: int, response: int, leader: int) -> _Size:
        """With one more row; a prompt that the row before has as well is read once."""
        longest = max(self.prompt, prompt), max(self.response, response)
        added = response if leader == self.leader else prompt + response
        return _Size(self.rows + 1, *longest, self.real + added, leader)

    def num_tokens(self, packed: bool) -> int:
        """Tokens that a pass computes: the real ones, or a grid of the longest parts."""
        return self.real if packed else self.rows * (self.prompt + self.response)
