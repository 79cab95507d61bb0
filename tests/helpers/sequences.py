"""Prompts and responses of given ids, laid out as the trainer lays them out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.types import Sequences


def sequences_of(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    extra: int = 0,
    padding: int = 0,
) -> Sequences:
    """Pad prompts on the left and responses on the right.

    Args:
        prompts: Ids of each prompt.
        responses: Ids of each response.
        extra: Columns of padding beyond what the longest needs, on both sides.
        padding: The id that stands at padding.
    """
    prompt_ids, prompt_mask = _padded([list(reversed(ids)) for ids in prompts], extra, padding)
    response_ids, response_mask = _padded(responses, extra, padding)
    return Sequences(
        prompt_ids=prompt_ids.flip(1),
        prompt_mask=prompt_mask.flip(1),
        response_ids=response_ids,
        response_mask=response_mask,
    )


def _padded(rows: Sequence[Sequence[int]], extra: int, padding: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + extra
    ids = [[*row, *[padding] * (width - len(row))] for row in rows]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
