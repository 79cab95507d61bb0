"""The one interface of all rollout engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.types import PromptBatch, Rollout


class Decoder(Protocol):
    """The one thing that an engine asks of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of some token ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """When a response ends.

    Args:
        end_ids: Any of these ends a response and belongs to it.
        pad_id: Written after the end; masks never look for it.
        decoder: Tokenizer, needed for stop strings.
    """

    end_ids: tuple[int, ...]
    pad_id: int
    decoder: Decoder | None = None


class RolloutEngine(ABC):
    """Samples responses from the current weights."""

    @abstractmethod
    def generate(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        policy_version: int,
        greedy: bool = False,
    ) -> Rollout:
        """Answer every prompt.

        Args:
            model: Causal language model of transformers, also with an adapter.
            prompts: Left-padded prompts, a row for each response wanted.
            sampling: Settings; nothing is read from the model's own generation settings.
            stops: End tokens and padding.
            policy_version: Recorded in the result.
            greedy: Take the likeliest token instead of a draw.
        """


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradient, and put the module's training flag back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
