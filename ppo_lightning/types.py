"""The records that travel through one iteration: prompts -> rollout -> experience -> minibatches.

All are frozen, hold tensors of one device, and know how to move (``to``) and to be cut
(``select``). B sequences, P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Message = Mapping[str, str]
"""One turn of a chat: ``{"role": ..., "content": ...}``."""

_Record = TypeVar("_Record", bound="TensorRecord")


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Base of the records: moves and cuts every tensor field, and leaves other fields alone."""

    def to(self: _Record, device: torch.device | str, non_blocking: bool = False) -> _Record:
        """Return the same record with every tensor on ``device``.

        The host does not wait for copies to a GPU, which come before whatever is asked of it next.
        In the other direction it does, unless told otherwise: it could read what is not there yet.
        """
        non_blocking = non_blocking or torch.device(device).type == "cuda"
        moved = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor | TensorRecord)
        }
        return replace(self, **moved)

    def select(self: _Record, rows: Tensor) -> _Record:
        """Return the record of some rows, in the order given.

        Args:
            rows: Row numbers. ``[N]`` long, on the CPU.
        """
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, TensorRecord):
                picked[f.name] = value.select(rows)
            elif isinstance(value, Tensor) and value.dim() > 0:
                picked[f.name] = value[rows.to(value.device)]
            elif isinstance(value, tuple):
                picked[f.name] = tuple(value[i] for i in rows.tolist())
        return replace(self, **picked)


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One prompt as the user gave it, and as the model reads it.

    Args:
        prompt: The string as given; for a chat, the content of its last user turn.
        text: What is tokenised: the string itself, or the chat rendered with the template.
        messages: The turns of a chat, or None for a plain string.
        metadata: The record's other fields, handed to the reward components.
        origin: Where it was read (``prompts.jsonl:17``), for messages about it.
        group: Name of the part of a mixture that it was drawn from; empty without one.
    """

    prompt: str
    text: str
    messages: tuple[Message, ...] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class PromptBatch(TensorRecord):
    """Prompts ready for an engine, one row for each response that is wanted.

    Args:
        prompt_ids: Left-padded token ids. ``[B, P]`` long.
        prompt_mask: True on real tokens, a suffix of each row. ``[B, P]`` bool.
        keys: Random-number key of each response (see ``functional.random``). ``[B]`` long.
        indices: Number of the response within the iteration, over all ranks. ``[B]`` long.
        records: The prompts themselves. B of them.
        groups: Number of the prompt that the response answers; equal for the
            ``responses_per_prompt`` responses of one prompt. ``[B]`` long.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    keys: Tensor
    indices: Tensor
    groups: Tensor
    records: tuple[PromptRecord, ...]

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]


@dataclass(frozen=True, kw_only=True)
class TrunkStates(TensorRecord):
    """What the frozen blocks of the policy make of the tokens of some sequences.

    Args:
        states: That leave the last of those blocks, of all tokens of a buffer, and a row of 0;
            cutting sequences leaves them whole. ``[T + 1, H]``.
        places: Row of ``states`` for each token that is read; any row at padding, -1 being that of
            0. ``[B, P + R]`` long.
    """

    states: Tensor
    places: Tensor

    def select(self, rows: Tensor) -> TrunkStates:
        """Return those of some sequences, in the order given. ``[N]`` long."""
        return replace(self, places=self.places[rows.to(self.places.device)])

    def between(self, first: int, last: int) -> TrunkStates:
        """Return those of some columns of the sequences, the last one not among them."""
        return replace(self, places=self.places[:, first:last])

    def at(self, cells: Tensor) -> Tensor:
        """Return the states of some tokens.

        Args:
            cells: Places in the ``[B, P + R]`` of the sequences, read row by row; what lies behind
                them stands for any token. ``[...]`` long.

        Returns:
            ``[..., H]``.
        """
        rows = self.places.flatten()
        return self.states[rows[cells.clamp_max(len(rows) - 1)]]


@dataclass(frozen=True, kw_only=True)
class Sequences(TensorRecord):
    """Prompts and responses as token ids: what every forward pass reads.

    Args:
        prompt_ids: Left-padded. ``[B, P]`` long.
        prompt_mask: True on real prompt tokens. ``[B, P]`` bool.
        response_ids: Right-padded. ``[B, R]`` long.
        response_mask: True on the policy's own tokens, EOS included. ``[B, R]`` bool. A row may
            have holes (tokens of a tool or another speaker): they are read, not scored.
        trunk: What the policy's frozen blocks make of all of it, where that is kept.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor
    trunk: TrunkStates | None = None

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    @property
    def input_ids(self) -> Tensor:
        """Prompt and response side by side. ``[B, P + R]`` long."""
        return torch.cat([self.prompt_ids, self.response_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """True on every token that is read: holes in a response count. ``[B, P + R]`` bool."""
        upto_last = self.response_mask.flip(1).cummax(1).values.flip(1)
        return torch.cat([self.prompt_mask, upto_last], dim=1)

    @property
    def width(self) -> int:
        """Columns of prompt and response, P + R."""
        return self.prompt_ids.shape[1] + self.response_ids.shape[1]

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that a forward pass computes, padding included."""
        return len(self) * self.width

    def trimmed(self) -> Sequences:
        """Drop the columns that are padding in every row (at least one response column stays)."""
        prompt = int(self.prompt_mask.any(0).sum())
        columns = self.attention_mask[:, self.prompt_ids.shape[1] :].any(0)
        response = max(1, int(columns.sum()))
        start = self.prompt_ids.shape[1] - prompt
        return Sequences(
            prompt_ids=self.prompt_ids[:, start:],
            prompt_mask=self.prompt_mask[:, start:],
            response_ids=self.response_ids[:, :response],
            response_mask=self.response_mask[:, :response],
            trunk=self.trunk and self.trunk.between(start, start + prompt + response),
        )


@dataclass(frozen=True, kw_only=True)
class Rollout(TensorRecord):
    """What an engine sampled for a ``PromptBatch``.

    Args:
        prompts: The prompts answered.
        response_ids: Sampled ids, right-padded. ``[B, R]`` long.
        response_mask: True on sampled tokens, made from recorded lengths. ``[B, R]`` bool.
        sampler_logprobs: Log-probability under the sampler, at the sampling temperature and
            before top-k/top-p. ``[B, R]`` float32, 0 at padding.
        truncated: True where the response ended without an end token or stop string. ``[B]`` bool.
        policy_version: Number of optimiser steps behind the weights that sampled.
        temperature: Of the distribution that was sampled from; whoever scores the tokens or trains
            on them reads it here.
        versions: Optimiser steps behind each response, where they are of several weights; None
            where they are not. ``[B]`` long.
    """

    prompts: PromptBatch
    response_ids: Tensor
    response_mask: Tensor
    sampler_logprobs: Tensor
    truncated: Tensor
    policy_version: int
    temperature: float
    versions: Tensor | None = None

    @property
    def sampled_by(self) -> Tensor:
        """Version of the weights that sampled each response. ``[B]`` long."""
        if self.versions is not None:
            return self.versions
        return torch.full_like(self.prompts.indices, self.policy_version)

    @property
    def sequences(self) -> Sequences:
        """The token ids alone, for a forward pass."""
        return Sequences(
            prompt_ids=self.prompts.prompt_ids,
            prompt_mask=self.prompts.prompt_mask,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
        )


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Responses as text, for reward components. Ids are kept: text is never tokenised again.

    Args:
        prompts: Prompt as given; for chats the last user turn. B strings.
        messages: The chat, or None for plain prompts. B entries.
        responses: Decoded response without special tokens; an empty response is ``""``.
        prompt_ids: Ids of the prompt, without padding.
        response_ids: Sampled ids, EOS included, without padding.
        truncated: Whether the response ended without an end token.
        metadata: Other fields of the prompt's record.
    """

    prompts: Sequence[str]
    messages: Sequence[tuple[Message, ...] | None]
    responses: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    truncated: Sequence[bool]
    metadata: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.responses)


@dataclass(frozen=True, kw_only=True)
class Experience(TensorRecord):
    """The buffer of one iteration on this rank, fixed while the update runs over it.

    Args:
        sequences: Token ids and masks.
        old_logprobs: log π_old of each response token. ``[B, R]`` float32, 0 at padding.
        old_values: V(s_t) before each token. ``[B, R]`` float32, 0 at padding.
        ref_logprobs: log π_ref of each response token. ``[B, R]`` float32, 0 at padding.
        advantages: Whitened over the whole buffer, all ranks. ``[B, R]`` float32.
        returns: GAE return of the raw advantages. ``[B, R]`` float32.
        indices: Number of the response within the iteration, over all ranks. ``[B]`` long.
        num_responses: Responses in the buffer over all ranks.
        iteration: Number of the iteration, from 0.
        policy_version: Optimiser steps behind the weights that sampled.
        temperature: Of the distribution that sampled: that of all log-probabilities here, and of
            those that the update compares with them.
        importance_weights: Factor on the policy loss of each token, where responses are not of the
            policy that ``old_logprobs`` are of; None is 1 everywhere. ``[B, R]`` float32, 0 at
            padding.
    """

    sequences: Sequences
    old_logprobs: Tensor
    old_values: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    indices: Tensor
    num_responses: int
    iteration: int
    policy_version: int
    temperature: float
    importance_weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An illness that was found in a run; the same on all ranks.

    Args:
        illness: Its name in the documentation's table, such as ``kl_runaway``.
        evidence: One sentence with the figures.
        iteration: In which it showed.
        source: Who found it.
    """

    illness: str
    evidence: str
    iteration: int
    source: str


@dataclass(frozen=True, kw_only=True)
class MiniBatch(TensorRecord):
    """The rows of one optimiser step on this rank.

    Args:
        experience: This rank's rows; may be none.
        epoch: Pass over the buffer, from 0.
        step: Number of the minibatch within the iteration, from 0.
        num_steps: Minibatches in the iteration.
        num_epochs: Most passes in the iteration.
    """

    experience: Experience
    epoch: int
    step: int
    num_steps: int
    num_epochs: int

    @property
    def is_first(self) -> bool:
        """Whether it is the first of the iteration: the policy is still the one that sampled."""
        return self.step == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last of the iteration."""
        return self.step == self.num_steps - 1
