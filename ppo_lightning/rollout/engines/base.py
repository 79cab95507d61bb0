"""The one interface of all rollout engines, and what those that decode in batches share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import mask_from_lengths
from ppo_lightning.models import (
    base_causal_lm,
    embedding_rows,
    end_token_ids,
    special_stop_ids,
    uncompiled,
)
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

    @classmethod
    def build(cls, tokenizer: Any, model: nn.Module, sampling: SamplingConfig) -> StopRules:
        """Gather what ends a response: by the tokenizer, the model and the settings.

        Args:
            tokenizer: Of transformers.
            model: Causal language model, with or without an adapter.
            sampling: Its stop strings that are special tokens become end ids.

        Raises:
            ConfigError: A stop string holds a special token beside other text, or the model has no
                such id as one of ``stop_token_ids``.
        """
        rows = embedding_rows(base_causal_lm(model))
        for id_ in sampling.stop_token_ids:
            if not 0 <= id_ < rows:
                raise ConfigError(
                    f"`sampling.stop_token_ids`: {id_} is no token of the model, whose ids are 0 "
                    f"to {rows - 1}. The tokenizer tells a token's id, or name the token in "
                    "`sampling.stop_strings`."
                )
        found = {
            *end_token_ids(tokenizer, model),
            *sampling.stop_token_ids,
            *special_stop_ids(tokenizer, sampling.stop_strings),
        }
        return cls(end_ids=tuple(sorted(found)), pad_id=tokenizer.pad_token_id, decoder=tokenizer)


class RolloutEngine(ABC):
    """Samples responses from the current weights.

    Attributes:
        dtype: Of the forward pass that samples, where the engine has one of its own; else None.
    """

    dtype: torch.dtype | None = None

    def check(self, model: nn.Module) -> None:
        """Refuse a model that the engine would not sample from rightly; most take any.

        Args:
            model: Causal language model of transformers, also with an adapter, just loaded.

        Raises:
            ModelError: Names the family and the way out.
        """
        return

    def prepare(self, policy: PolicyConfig) -> None:
        """Learn how the model is loaded, which an engine in another process has to do as well."""
        return

    def temperatures(self, sampling: SamplingConfig) -> tuple[float, float]:
        """Say between which temperatures the engine can sample, beside the other settings.

        A run's dial ``temperature`` stays within them.

        Args:
            sampling: As configured.
        """
        return 0.0, inf

    def close(self) -> None:
        """Let go of what was started; called when a run ends, however it does."""
        return

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
            sampling: Settings; nothing is read from the model's own generation settings. The
                temperature may be another one at the next call, and is recorded in the result.
            stops: End tokens and padding.
            policy_version: Recorded in the result.
            greedy: Take the likeliest token instead of a draw.
        """


@dataclass
class Decoded:
    """Responses of one decode batch.

    Args:
        ids: What stands after a row's length does not matter. ``[B, T]`` long.
        logprobs: Under the sampler, 0 after a row's length. ``[B, T]`` float32.
        lengths: Tokens of each response. ``[B]`` long.
        ended: By an end token or a stop string. ``[B]`` bool.
    """

    ids: Tensor
    logprobs: Tensor
    lengths: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, pad_id: int, device: torch.device) -> Decoded:
        """Make room for responses, all of length 0."""
        return cls(
            ids=torch.full((rows, width), pad_id, device=device),
            logprobs=torch.zeros(rows, width, device=device),
            lengths=torch.zeros(rows, dtype=torch.long, device=device),
            ended=torch.zeros(rows, dtype=torch.bool, device=device),
        )


class BatchedEngine(RolloutEngine):
    """Decodes ``sampling.batch_size`` rows at once and joins the batches."""

    @abstractmethod
    def decode_batch(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        greedy: bool,
    ) -> Decoded:
        """Answer a few prompts, at least one; the model evaluates, without gradient."""

    @override
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
        size = sampling.batch_size or max(1, len(prompts))
        batches = torch.split(torch.arange(len(prompts)), size) if len(prompts) else ()
        with inference_mode_of(model):
            parts = [
                self.decode_batch(
                    model, prompts.select(rows), sampling=sampling, stops=stops, greedy=greedy
                )
                for rows in batches
            ]
        return joined(
            prompts,
            parts or [_nothing(prompts)],
            stops.pad_id,
            policy_version=policy_version,
            temperature=sampling.temperature,
        )


def _nothing(prompts: PromptBatch) -> Decoded:
    """Answers to no prompts."""
    ids = prompts.prompt_ids[:, :0]
    lengths = ids.sum(1)
    return Decoded(ids=ids, logprobs=ids.float(), lengths=lengths, ended=lengths.bool())


def joined(
    prompts: PromptBatch,
    parts: Sequence[Decoded],
    pad_id: int,
    *,
    policy_version: int,
    temperature: float,
) -> Rollout:
    """Put the batches' rows one below the other, as wide as the longest response."""
    lengths = torch.cat([part.lengths for part in parts])
    width = int(lengths.max()) if len(lengths) else 0
    return Rollout(
        prompts=prompts,
        response_ids=torch.cat([_widened(part.ids, width, pad_id) for part in parts]),
        response_mask=mask_from_lengths(lengths, width),
        sampler_logprobs=torch.cat([_widened(part.logprobs, width, 0.0) for part in parts]),
        truncated=~torch.cat([part.ended for part in parts]),
        policy_version=policy_version,
        temperature=temperature,
    )


def _widened(values: Tensor, width: int, fill: float) -> Tensor:
    """Cut or pad the columns of ``[B, T]`` to ``width``."""
    values = values[:, :width]
    return nn.functional.pad(values, (0, width - values.shape[1]), value=fill)


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Evaluate the plain code without gradient, and put the module's training flag back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), uncompiled(base_causal_lm(model)):
            yield
    finally:
        model.train(was_training)
