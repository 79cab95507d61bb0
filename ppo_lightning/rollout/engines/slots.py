"""Decoding in slots: a response that has ended makes room for the next prompt.

Nothing that a slot has to do depends on the others, so it does not matter which prompt gets one
when: draws belong to the response, and places and masks to the sequence in the slot.

What slots do is kept on the host, and sent to the device as it is needed. A step waits for the
device once, to learn which tokens were drawn; admitting prompts and closing up do not wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.distributed import pulse
from ppo_lightning.functional import first_members, hash_uniform
from ppo_lightning.models import KeyValueSlots, read_prompts, sent, step_slots
from ppo_lightning.rollout.engines.base import Decoded, StopRules
from ppo_lightning.rollout.engines.draw import draw_tokens
from ppo_lightning.rollout.engines.graphs import (
    Step,
    StepGraphs,
    can_be_recorded,
    cuda_capture,
)
from ppo_lightning.rollout.engines.stop_text import TextStops
from ppo_lightning.types import PromptBatch

PROMPT_TOKENS = 8192
"""Most prompt tokens that are read in one pass."""

_CLOSE_UP = 0.85
"""Idle slots are computed too, so they are closed up once no more than this share is going."""


@dataclass
class _Slots:
    """What each slot is doing, on the host. ``[N]`` each.

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
    def idle(cls, count: int) -> _Slots:
        """Make slots that do nothing yet."""
        rows, lengths, steps, ids = torch.zeros(4, count, dtype=torch.long)
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
        cuda_graphs: Replay steps on a GPU, where the model lets itself be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        sampling: SamplingConfig,
        stops: StopRules,
        greedy: bool,
        cuda_graphs: bool = True,
    ) -> None:
        self.model, self.prompts = model, prompts
        self.sampling, self.stops, self.greedy = sampling, stops, greedy
        count, self._device = len(prompts), prompts.prompt_ids.device
        self._masks, self._groups = prompts.prompt_mask.cpu(), prompts.groups.cpu()
        self.prompt_lengths = self._masks.sum(1)
        width = int(self.prompt_lengths.max()) + sampling.max_new_tokens
        self.slots = _Slots.idle(min(count, sampling.batch_size or count))
        self.memory = KeyValueSlots(len(self.slots.rows), width)
        # The log-probabilities alone are written where they are made.
        self.out = Decoded.empty(count, sampling.max_new_tokens, stops.pad_id, torch.device("cpu"))
        self.out.logprobs = self.out.logprobs.to(self._device)
        self._end_ids = torch.tensor(stops.end_ids, dtype=torch.long)
        self._texts = TextStops.build(sampling, stops)
        self._next_row = 0
        self._step = _step(model, self.memory, self._device, cuda_graphs)

    def run(self) -> Decoded:
        """Go on until every response has ended or used its budget."""
        while self._admit():
            slots = self.slots
            pulse.beat()
            logits = self._step(slots.last_ids, slots.lengths, int(slots.lengths.max()) + 1)
            slots.lengths += slots.going
            going = slots.going.nonzero()[:, 0]
            self._write(going, logits[self._sent(going)])
        return replace(
            self.out,
            ids=self._sent(self.out.ids),
            lengths=self._sent(self.out.lengths),
            ended=self._sent(self.out.ended),
        )

    def _sent(self, values: Tensor) -> Tensor:
        return sent(values, self._device)

    def _admit(self) -> bool:
        """Give idle slots to prompts that wait, or close them up; says whether any is going."""
        while (idle := (~self.slots.going).nonzero()[:, 0]).numel() and self._waiting:
            free = idle[: self._waiting]
            rows = torch.arange(self._next_row, self._next_row + len(free))
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
        """Read prompts and draw the first token of each. Both ``[N]`` long, on the host."""
        slots = self.slots
        slots.rows[into], slots.lengths[into] = rows, self.prompt_lengths[rows]
        slots.steps[into] = 0
        groups, member = torch.unique(self._groups[rows], return_inverse=True)
        first = first_members(member, len(groups))
        size = max(1, PROMPT_TOKENS // int(self.prompt_lengths.max()))
        parts = [self._read(rows[some], into[some]) for some in torch.split(first, size)]
        others = torch.ones_like(member, dtype=torch.bool).index_fill_(0, first, False)
        span = int(slots.lengths[into].max())
        leaders = into[first[member[others]]]
        self.memory.copy(self._sent(leaders), self._sent(into[others]), span)
        self._write(into, torch.cat(parts)[self._sent(member)])

    def _read(self, rows: Tensor, into: Tensor) -> Tensor:
        ids = self.prompts.prompt_ids[self._sent(rows)]
        return read_prompts(self.model, ids, self._masks[rows], self.memory, into)

    def _write(self, into: Tensor, logits: Tensor) -> None:
        """Draw and record the next token of some slots.

        Args:
            into: Their numbers, on the host. ``[N]`` long.
            logits: ``[N, V]``.
        """
        slots = self.slots
        rows, steps = slots.rows[into], slots.steps[into]
        places = self._sent(rows), self._sent(steps)
        banned = steps < self.sampling.min_new_tokens
        early = self.sampling.min_new_tokens > 0 and bool(banned.any())
        drawn, logprobs = draw_tokens(
            logits,
            None if self.greedy else hash_uniform(self.prompts.keys[places[0]], places[1]),
            sampling=self.sampling,
            banned_ids=self.stops.end_ids if early else (),
            banned=self._sent(banned),
        )
        self.out.logprobs[places] = logprobs
        ids = drawn.cpu()  # here the host waits
        self.out.ids[rows, steps] = ids
        self.out.lengths[rows] += 1
        ended = torch.isin(ids, self._end_ids)
        if self._texts is not None:
            ended |= self._texts.ended(rows, self.out)
        self.out.ended[rows] = ended
        slots.last_ids[into], slots.steps[into] = ids, steps + 1
        slots.going[into] = ~ended & (steps + 1 < self.sampling.max_new_tokens)

    def _close_up(self, count: int) -> None:
        """Move the slots that are going to the front."""
        going = self.slots.going
        targets = (~going[:count]).nonzero()[:, 0]
        sources = count + going[count:].nonzero()[:, 0]
        span = int(self.slots.lengths.max())
        self.memory.copy(self._sent(sources), self._sent(targets), span)
        self.slots.move(sources, targets)
        self.slots.cut(count)


def _step(model: nn.Module, memory: KeyValueSlots, device: torch.device, cuda_graphs: bool) -> Step:
    """Make what runs a step, given ids and lengths on the host.

    It knows nothing of the decoder: the memory is free again as soon as that is gone.
    """
    if cuda_graphs and can_be_recorded(model, device):
        step = partial(_step_on_device, model, memory)
        return StepGraphs(step, memory.count, memory.width, device, cuda_capture())

    def plain(ids: Tensor, lengths: Tensor, span: int) -> Tensor:
        return step_slots(model, sent(ids, device), sent(lengths, device), memory, span)

    return plain


def _step_on_device(
    model: nn.Module, memory: KeyValueSlots, ids: Tensor, lengths: Tensor, span: int
) -> Tensor:
    return step_slots(model, ids, lengths, memory, span)
