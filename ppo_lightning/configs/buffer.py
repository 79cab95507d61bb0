"""Size of the on-policy buffer and how it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require, require_at_least, require_fields


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """The buffer of one iteration, counted over all ranks.

    Args:
        num_prompts: Prompts in one iteration; with ``num_tokens`` in the first.
        responses_per_prompt: Responses sampled for each prompt.
        num_minibatches: Optimiser steps in one pass over the buffer. Where the sizes do not
            divide, minibatches differ by one response.
        num_tokens: Response tokens in one iteration, about: the number of prompts follows the
            tokens that counted for a prompt in the iteration before. None keeps to
            ``num_prompts``.
        shuffle: What is drawn into minibatches: single ``responses``, or ``prompts`` with all
            theirs; a prompt is then computed once for all of them, where padding is left out, and
            minibatches differ by one prompt's responses.
    """

    num_prompts: int = 64
    responses_per_prompt: int = 1
    num_minibatches: int = 4
    num_tokens: int | None = None
    shuffle: Literal["responses", "prompts"] = "responses"

    def __post_init__(self) -> None:
        require_fields(self)
        for name in ("num_prompts", "responses_per_prompt", "num_minibatches"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("num_tokens", self.num_tokens, 1)
        require(
            self.num_minibatches <= self.num_responses,
            f"`num_minibatches` ({self.num_minibatches}) must not exceed the responses of one "
            f"iteration, num_prompts x responses_per_prompt = {self.num_responses}.",
        )
        require(
            self.shuffle == "responses" or self.num_minibatches <= self.num_prompts,
            f"`num_minibatches` ({self.num_minibatches}) must not exceed `num_prompts` "
            f"({self.num_prompts}) with `shuffle: prompts`, which keeps a prompt's responses "
            "together.",
        )

    @property
    def num_responses(self) -> int:
        """Responses in one iteration, over all ranks."""
        return self.num_prompts * self.responses_per_prompt

    @property
    def together(self) -> int:
        """How many responses, one after the other, stay in one minibatch."""
        return self.responses_per_prompt if self.shuffle == "prompts" else 1
