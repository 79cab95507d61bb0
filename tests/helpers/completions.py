"""Completions for tests of rewards, from no more than the responses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ppo_lightning.rewards import Reward
from ppo_lightning.types import Completions


def make_completions(
    responses: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    messages: Sequence[Any] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    truncated: Sequence[bool] | None = None,
    response_ids: Sequence[Sequence[int]] | None = None,
) -> Completions:
    """Fill in what is not given: prompts `p0`, `p1` …, plain, no metadata, one id a character."""
    count = len(responses)
    return Completions(
        prompts=prompts if prompts is not None else [f"p{i}" for i in range(count)],
        messages=messages if messages is not None else [None] * count,
        responses=responses,
        prompt_ids=[[1, 2]] * count,
        response_ids=(
            response_ids
            if response_ids is not None
            else [[*map(ord, text), 0] for text in responses]
        ),
        truncated=truncated if truncated is not None else [False] * count,
        metadata=metadata if metadata is not None else [{}] * count,
    )


class Says(Reward):
    """Answers with what it is told to: a value, or a function of the completions."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[Completions] = []

    def __call__(self, completions: Completions) -> Any:
        self.calls.append(completions)
        return self.answer(completions) if isinstance(self.answer, Callable) else self.answer


def numbers_in(completions: Completions) -> list[float]:
    """Score a response by the number that it is: ``Says(numbers_in)``."""
    return [float(text) for text in completions.responses]
