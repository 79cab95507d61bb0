"""What components read of completions: text to judge, and fields of the prompts' records."""

from __future__ import annotations

from typing import Any

from ppo_lightning.errors import RewardError, unknown_key_message
from ppo_lightning.types import Completions


def judged_texts(completions: Completions, *, include_prompt: bool) -> list[str]:
    """Return the text of each response, after its prompt if so asked.

    A plain prompt is continued by its response, so nothing is put between them; the last user turn
    of a chat gets a line of its own.

    Args:
        completions: B of them.
        include_prompt: Whether the prompt is judged too.

    Returns:
        B strings.
    """
    if not include_prompt:
        return list(completions.responses)
    rows = zip(completions.prompts, completions.messages, completions.responses, strict=True)
    return [
        prompt + ("" if messages is None else "\n") + response
        for prompt, messages, response in rows
    ]


def field_column(completions: Completions, field: str) -> list[Any]:
    """Return one field of every prompt's record.

    Args:
        completions: B of them.
        field: Key of the record.

    Returns:
        B values.

    Raises:
        RewardError: A record lacks the field; names the sample and the nearest key.
    """
    for i, record in enumerate(completions.metadata):
        if field not in record:
            message = unknown_key_message(field, map(str, record), "the prompt's record")
            raise RewardError(f"{message} {quoted(completions, i)}", sample=i)
    return [record[field] for record in completions.metadata]


def quoted(completions: Completions, sample: int) -> str:
    """Name a sample in a message by the beginnings of its prompt and response."""
    prompt, response = completions.prompts[sample], completions.responses[sample]
    return f"Prompt: {_short(prompt)}, response: {_short(response)}."


def _short(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[: most - 1] + "…")
