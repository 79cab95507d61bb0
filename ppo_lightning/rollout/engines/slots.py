"""Decoding in slots: a response that has ended makes room for the next prompt.

Nothing that a slot has to do depends on the others, so it does not matter which prompt gets one
when: draws belong to the response, and places and masks to the sequence in the slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.functional import first_members, hash_uniform
from ppo_lightning.models import KeyValueSlots, read_prompts, step_slots
from ppo_lightning.rollout.engines.base import Decoded, StopRules
from ppo_lightning.rollout.engines.draw import draw_tokens
from ppo_lightning.types import PromptBatch

PROMPT_TOKENS = 8192
"""Most prompt tokens that are read in one pass."""

_CLOSE_UP = 0.85
"""Idle slots are computed too, so they are closed up once no more than this share is going."""


@dataclass
class _Slots:
    """What each slot is doing. ``[N]`` each.

    Args:
        rows: Row of the output that it writes. Long.
        lengths: Tokens that it holds. Long.
        steps: Tokens of the response. Long.
        last_ids: The last one, which the model has not read. Long.
        going: Whether the response goes on; else the slot is idle. Bool.
    """

    rows: Tensor
    lengths: Tensor
    steps: Tensor
    last_ids: Tensor
    going: Tensor

    @classmethod
    def idle(cls, count: int, device: torch.device) -> _Slots:
        """Make slots that do nothing yet."""
        rows, lengths, steps, ids = torch.zeros(4, count, dtype=torch.long, device=device)
        return cls(rows, lengths, steps, ids, going=rows.bool())

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Let some slots do what others did."""
        for part in vars(self).values():
            part[targets] = part[sources]

    def cut(self, count: int) -> None:
        """Keep the first slots."""
        for name, part in vars(self).items():
            setattr(self, name, part[:count])


class SlotDecoder:
    """Answers the prompts of one rollout.

    Args:
        model: Causal language model of transformers that can be decoded in slots.
        prompts: At least one.
        sampling: Settings; ``batch_size`` slots, or one for each prompt.
        stops: When a response ends.
        greedy: Take the likeliest token instead of a draw.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        greedy: bool,
    ) -> None:
        self.model, self.prompts = model, prompts
        self.sampling, self.stops, self.greedy = sampling, stops, greedy
        count, device = len(prompts), prompts.prompt_ids.device
        self.prompt_lengths = prompts.prompt_mask.sum(1)
        width = int(self.prompt_lengths.max()) + sampling.max_new_tokens
        self.slots = _Slots.idle(min(count, sampling.batch_size or count), device)
        self.memory = KeyValueSlots(len(self.slots.rows), width)
        self.out = Decoded.empty(count, sampling.max_new_tokens, stops.pad_id, device)
        self._end_ids = torch.tensor(stops.end_ids, dtype=torch.long, device=device)
        self._next_row = 0

    def run(self) -> Decoded:
        """Go on until every response has ended or used its budget."""
        while self._admit():
            slots = self.slots
            logits = step_slots(self.model, slots.last_ids, slots.lengths, self.memory)
            slots.lengths += slots.going
            going = slots.going.nonzero()[:, 0]
            self._write(going, logits[going])
        return self.out

    def _admit(self) -> bool:
        """Give idle slots to prompts that wait, or close them up; says whether any is going."""
        while (idle := (~self.slots.going).nonzero()[:, 0]).numel() and self._waiting:
            free = idle[: self._waiting]
            rows = torch.arange(self._next_row, self._next_row + len(free), device=free.device)
            self._next_row += len(free)
            self._begin(free, rows)
        going = len(self.slots.going) - len(idle)
        if 0 < going <= _CLOSE_UP * len(self.slots.going):
            self._close_up(going)
        return going > 0

    @property
    def _waiting(self) -> int:
        return len(self.prompts) - self._next_row

    def _begin(self, into: Tensor, rows: Tensor) -> None:
        """Read prompts and draw the first token of each. Both ``[N]`` long."""
        slots = self.slots
        slots.rows[into], slots.lengths[into] = rows, self.prompt_lengths[rows]
        slots.steps[into] = 0
        groups, member = torch.unique(self.prompts.groups[rows], return_inverse=True)
        first = first_members(member, len(groups))
        size = max(1, PROMPT_TOKENS // int(self.prompt_lengths.max()))
        parts = [self._read(rows[some], into[some]) for some in torch.split(first, size)]
        others = torch.ones_like(member, dtype=torch.bool).index_fill_(0, first, False)
        span = int(slots.lengths[into].max())
        self.memory.copy(into[first[member[others]]], into[others], span)
        self._write(into, torch.cat(parts)[member])

    def _read(self, rows: Tensor, into: Tensor) -> Tensor:
        ids, mask = self.prompts.prompt_ids[rows], self.prompts.prompt_mask[rows]
        return read_prompts(self.model, ids, mask, self.memory, into)

    def _write(self, into: Tensor, logits: Tensor) -> None:
        """Draw and record the next token of some slots.

        Args:
            into: Their numbers. ``[N]`` long.
            logits: ``[N, V]``.
        """
        slots = self.slots
        rows, steps = slots.rows[into], slots.steps[into]
        ids, logprobs = draw_tokens(
            logits,
            None if self.greedy else hash_uniform(self.prompts.keys[rows], steps),
            sampling=self.sampling,
            banned_ids=self.stops.end_ids if self.sampling.min_new_tokens else (),
            banned=steps < self.sampling.min_new_tokens,
        )
        self.out.ids[rows, steps], self.out.logprobs[rows, steps] = ids, logprobs
        self.out.lengths[rows] += 1
        ended = torch.isin(ids, self._end_ids)
        if self.sampling.stop_strings:
            ended |= self.out.stopped_by_text(rows, self.sampling, self.stops)
        self.out.ended[rows] = ended
        slots.last_ids[into], slots.steps[into] = ids, steps + 1
        slots.going[into] = ~ended & (steps + 1 < self.sampling.max_new_tokens)

    def _close_up(self, count: int) -> None:
        """Move the slots that are going to the front."""
        going = self.slots.going
        targets = (~going[:count]).nonzero()[:, 0]
        sources = count + going[count:].nonzero()[:, 0]
        self.memory.copy(sources, targets, int(self.slots.lengths.max()))
        self.slots.move(sources, targets)
        self.slots.cut(count)
