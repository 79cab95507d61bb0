"""Prompts side by side in one tensor: the only place that pads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_lightning.data.prompts.feeds import TokenizedPrompts
from ppo_lightning.types import PromptBatch


def left_pad(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Put prompts side by side, padded on the left so that all end at the same column.

    The mask comes from the lengths and never from looking for ``pad_id``, which may be a token of
    the text (a tokenizer without a pad token lends its EOS).

    Args:
        ids: Token ids of each prompt. B of them.
        pad_id: Fills the places that are never read.

    Returns:
        ``(prompt_ids, prompt_mask)``, ``[B, P]`` long and bool, P being the longest prompt.
    """
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.long)
    width = max(map(len, ids), default=0)
    rows = [[pad_id] * (width - len(row)) + list(row) for row in ids]
    prompt_ids = torch.tensor(rows, dtype=torch.long).reshape(len(ids), width)
    mask = torch.arange(width) >= width - lengths[:, None]  # [B, P]
    return prompt_ids, mask


def make_prompt_batch(
    prompts: TokenizedPrompts,
    numbers: Sequence[int],
    *,
    keys: Tensor,
    indices: Tensor,
    groups: Tensor,
    pad_id: int,
) -> PromptBatch:
    """Make the batch of some prompts, one row for each response that is wanted.

    Args:
        prompts: Those that the rows are of: a ``PromptSet``, or what was ``Taken`` from a feed.
        numbers: Which of them, in the order of the rows; a number may come several times. B.
        keys: Random-number key of each response. ``[B]`` long.
        indices: Number of each response within the iteration, over all ranks. ``[B]`` long.
        groups: Number of the prompt that each response answers. ``[B]`` long.
        pad_id: Fills the places that are never read.

    Raises:
        ValueError: ``keys``, ``indices`` or ``groups`` have another length than ``numbers``.
    """
    for name, values in (("keys", keys), ("indices", indices), ("groups", groups)):
        if values.shape != (len(numbers),):
            raise ValueError(
                f"`{name}` must have the shape ({len(numbers)},), one value for each of `numbers`, "
                f"got {tuple(values.shape)}."
            )
    prompt_ids, prompt_mask = left_pad([prompts.ids[number] for number in numbers], pad_id)
    return PromptBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        keys=keys,
        indices=indices,
        groups=groups,
        records=tuple(prompts.records[number] for number in numbers),
    )
