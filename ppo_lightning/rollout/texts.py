"""Responses as text, for reward components, logs and files; ids stay what was sampled."""

from __future__ import annotations

from ppo_lightning.rollout.engines.base import Decoder
from ppo_lightning.types import Completions, Rollout


def completions_of(rollout: Rollout, decoder: Decoder) -> Completions:
    """Decode every response, without special tokens.

    Args:
        rollout: Sampled responses.
        decoder: The actor's tokenizer.
    """
    records = rollout.prompts.records
    response_ids = _unpadded(rollout.response_ids.tolist(), rollout.response_mask.tolist())
    return Completions(
        prompts=[record.prompt for record in records],
        messages=[record.messages for record in records],
        responses=[decoder.decode(ids, skip_special_tokens=True) for ids in response_ids],
        prompt_ids=_unpadded(
            rollout.prompts.prompt_ids.tolist(), rollout.prompts.prompt_mask.tolist()
        ),
        response_ids=response_ids,
        truncated=rollout.truncated.tolist(),
        metadata=[record.metadata for record in records],
    )


def _unpadded(ids: list[list[int]], mask: list[list[bool]]) -> list[list[int]]:
    return [
        [token for token, real in zip(row, real_row, strict=True) if real]
        for row, real_row in zip(ids, mask, strict=True)
    ]
