"""Decoding in slots: keys and values of each sequence in a place of its own, allocated once.

A slot holds a sequence from its first token on, without padding, so sequences of any length stand
side by side; one that has ended gives its slot to another. Prompts are read packed, all at once.
Nothing here waits for the device: what decides about shapes is known on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ppo_lightning.models.attention import Packing
from ppo_lightning.models.inputs import (
    ModelInputs,
    cache_name,
    call_model,
    packed_inputs,
    replaced_forward,
)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Move a small tensor of the host to a device, which is not waited for.

    The copy is ordered before what the device is asked to do next, and memory that is pinned is not
    used again before it was read; so the caller may go on to change ``values``.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class KeyValueSlots(Cache):
    """Keys and values of the sequences that are being decoded.

    Args:
        count: Slots.
        width: Most tokens of a sequence.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__(layers=[])
        self.count, self.width = count, width
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._into: tuple[Tensor, Tensor] | None = None
        self._span: int | None = None

    def reading(self, slots: Tensor, columns: Tensor) -> KeyValueSlots:
        """Take in the tokens of a packed row in the next pass.

        Args:
            slots: Slot of each token. ``[T]`` long.
            columns: Its place in the sequence. ``[T]`` long.
        """
        self._into, self._span = (slots, columns), None
        return self

    def stepping(self, lengths: Tensor, span: int) -> KeyValueSlots:
        """Take in one token for each of the first slots in the next pass.

        Args:
            lengths: Tokens that each slot holds already. ``[N]`` long.
            span: Columns that are looked at, more than the largest length.
        """
        self._into, self._span = (torch.arange(len(lengths), device=lengths.device), lengths), span
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what a layer has made, and return what its attention looks at."""
        assert self._into is not None
        if layer_idx == len(self._parts):
            self._parts.append((self._room(key_states), self._room(value_states)))
        keys, values = self._parts[layer_idx]
        slots, columns = self._into
        if self._span is None:
            keys[slots, :, columns] = key_states[0].transpose(0, 1)
            values[slots, :, columns] = value_states[0].transpose(0, 1)
            return key_states, value_states
        keys[slots, :, columns] = key_states[:, :, 0]
        values[slots, :, columns] = value_states[:, :, 0]
        return keys[: len(slots), :, : self._span], values[: len(slots), :, : self._span]

    def copy(self, sources: Tensor, targets: Tensor, span: int) -> None:
        """Put the first columns of some slots into others, which may overlap with them.

        Args:
            sources: ``[N]`` long.
            targets: ``[N]`` long.
            span: How many columns.
        """
        for part in self._parts:
            for tensor in part:
                tensor[targets, :, :span] = tensor[sources, :, :span]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Nothing is derived from it: places and masks come with each call."""
        return 0

    def _room(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self.count, heads, self.width, size)


def read_prompts(
    model: nn.Module, prompts: Tensor, mask: Tensor, slots: KeyValueSlots, into: Tensor
) -> Tensor:
    """Read whole prompts into slots.

    Args:
        model: Causal language model of transformers whose rows may be packed.
        prompts: On the model's device. ``[N, P]`` long.
        mask: True on real tokens, on the CPU. ``[N, P]`` bool.
        slots: Where keys and values go.
        into: Slot of each prompt, on the CPU. ``[N]`` long.

    Returns:
        Logits after each prompt. ``[N, V]``.
    """
    device = prompts.device
    lengths = mask.sum(1)
    rows, places = mask.nonzero().unbind(1)
    starts = lengths.cumsum(0) - lengths
    columns = sent(torch.arange(len(rows)) - starts[rows], device)
    ids = prompts[sent(rows, device), sent(places, device)]
    inputs = packed_inputs(ids, columns, Packing.of(lengths, device))
    slots.reading(sent(into[rows], device), columns)
    return _last_logits(model, inputs, slots, sent(starts + lengths - 1, device))


def step_slots(
    model: nn.Module, ids: Tensor, lengths: Tensor, slots: KeyValueSlots, span: int | None = None
) -> Tensor:
    """Read one more token in each of the first slots.

    Args:
        model: As in ``read_prompts``.
        ids: The tokens. ``[N]`` long.
        lengths: Tokens that each slot holds already. ``[N]`` long.
        slots: They grow by one token.
        span: Columns that are looked at, more than the largest length; None counts them, for which
            it waits for the device.

    Returns:
        Logits after the tokens. ``[N, V]``.
    """
    if span is None:
        span = int(lengths.max()) + 1
    seen = torch.arange(span, device=ids.device) <= lengths[:, None]
    inputs = ModelInputs(ids[:, None], seen[:, None, None], lengths[:, None])
    slots.stepping(lengths, span)
    return _call(model, inputs, slots).logits[:, -1]  # type: ignore[no-any-return]


def _last_logits(
    model: nn.Module, inputs: ModelInputs, slots: KeyValueSlots, places: Tensor
) -> Tensor:
    """Logits at some places of a packed row only. ``[N, V]``."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    with replaced_forward(head, lambda plain, hidden: plain(hidden[:, places])):
        return _call(model, inputs, slots).logits[0]  # type: ignore[no-any-return]


def _call(model: nn.Module, inputs: ModelInputs, slots: KeyValueSlots) -> Any:
    return call_model(model, inputs, use_cache=True, **{cache_name(model): slots})
