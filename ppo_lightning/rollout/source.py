"""What the data module asks of the module that is trained with it."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ppo_lightning.types import Experience, PromptBatch


@runtime_checkable
class RolloutSource(Protocol):
    """Turns prompts into a scored buffer. ``PPOModule`` is one."""

    @property
    def tokenizer(self) -> Any:
        """The actor's tokenizer."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """Longest prompt that leaves room for a whole response; None is unlimited."""

    @property
    def shortest_model(self) -> str | None:
        """Setting that names the model with the fewest positions; None where nothing limits."""

    @property
    def num_passes(self) -> int:
        """Most passes over a buffer."""

    @property
    def num_prompts_factor(self) -> float:
        """Factor on the prompts of the next buffer."""

    def begin_iteration(self, iteration: int) -> None:
        """Forget the iteration before; what is asked afterwards is of this one."""

    def collect(self, prompts: PromptBatch, *, iteration: int, num_responses: int) -> Experience:
        """Sample, score and shape one buffer.

        Args:
            prompts: This rank's prompts, a row for each response.
            iteration: Number of the iteration.
            num_responses: Responses over all ranks.
        """


@runtime_checkable
class LookAheadSource(RolloutSource, Protocol):
    """A source that can be told of the next iteration's prompts before this one is trained on."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it wants to be told."""

    def prefetch(self, prompts: PromptBatch, *, iteration: int) -> None:
        """Take the prompts of the next iteration; called before ``collect`` of this one.

        Args:
            prompts: This rank's, a row for each response.
            iteration: Number of the next iteration.
        """
