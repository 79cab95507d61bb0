"""How a buffer is cut: into minibatches by chance, into microbatches by a budget of tokens."""

from __future__ import annotations

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


def microbatch_rows(sequences: Sequences, *, max_tokens: int | None) -> list[Tensor]:
    """Group rows of similar length so that no group computes more than ``max_tokens``.

    Args:
        sequences: The rows; may be none.
        max_tokens: Most tokens in a group, padding included; None makes one group. A row longer
            than that is a group of its own.

    Returns:
        Row numbers for each group, ``[N_i]`` long; no group for no row.
    """
    if len(sequences) == 0:
        return []
    if max_tokens is None:
        return [torch.arange(len(sequences))]
    prompts = sequences.prompt_mask.sum(1).tolist()
    width = sequences.prompt_ids.shape[1]
    responses = sequences.attention_mask[:, width:].sum(1).tolist()
    order = sorted(range(len(prompts)), key=lambda row: -(prompts[row] + responses[row]))
    groups: list[list[int]] = []
    longest = (0, 0)
    for row in order:
        grown = (max(longest[0], prompts[row]), max(longest[1], responses[row]))
        if groups and (len(groups[-1]) + 1) * sum(grown) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            grown = (prompts[row], responses[row])
        longest = grown
    return [torch.tensor(group) for group in groups]
