"""A model's way of reading: may padding be left out, and are its logits what its last layer makes.

Both are found out by trying, once, when the model is loaded. A model that was never tried is read
the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.functional import position_ids
from ppo_lightning.models.attention import ATTENTION, Packing
from ppo_lightning.models.checks import can_be_tried, embedding_rows
from ppo_lightning.models.fused.classes import CANNOT, family_of
from ppo_lightning.models.inputs import ModelInputs, call_model, packed_inputs
from ppo_lightning.models.slots import KeyValueSlots, read_prompts, step_slots

_ATTRIBUTE = "_reading"
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # deep models round a few times 1e-4
_COARSE_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a model may be read.

    Args:
        packed: Rows may lie one after the other, without padding.
        longest: Most tokens of such a row; None is unlimited.
        slots: Sequences may be decoded in slots, see ``ppo_lightning.models.slots``.
        fused_head: The logits are what the output layer makes, and nothing is done to them after.
    """

    packed: bool = False
    longest: int | None = None
    slots: bool = False
    fused_head: bool = False

    def takes_packed(self, width: int) -> bool:
        """Whether rows of so many tokens at most may be packed."""
        return self.packed and (self.longest is None or width <= self.longest)

    def takes_slots(self, width: int) -> bool:
        """Whether sequences that grow to so many tokens may be decoded in slots."""
        return self.slots and self.takes_packed(width)


def reading_of(model: nn.Module) -> Reading:
    """Return what was found out about a model, or about the trunk of one."""
    return getattr(model, _ATTRIBUTE, Reading())


def keep_reading(model: Any, reading: Reading) -> None:
    """Remember it, also for the trunk alone."""
    for part in {id(part): part for part in (model, model.base_model)}.values():
        setattr(part, _ATTRIBUTE, reading)


def learn_reading(model: Any, *, packing: bool = True) -> Reading:
    """Find out how a model that has just been loaded may be read.

    Where rows may be packed, the model's attention is set to the one that can
    (``ppo_lightning.models.attention``); without a packing that does what ``sdpa`` does.

    Args:
        model: Of transformers, evaluating, on the CPU; others are read the plain way.
        packing: Whether to try to leave padding out.
    """
    reading = Reading()
    if can_be_tried(model):
        with torch.no_grad():
            reading = replace(reading, fused_head=_has_plain_head(model))
            if packing and _takes_packing(model):
                longest, slots = attention_window(model.config), _takes_slots(model)
                reading = replace(reading, packed=True, longest=longest, slots=slots)
    keep_reading(model, reading)
    return reading


def attention_window(config: Any) -> int | None:
    """Tokens that the layers with a sliding or chunked attention see; None if there is no such."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding"]
    if not any(word in kind for kind in kinds for word in ("sliding", "chunked")):
        return None
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((int(size) for size in sizes if size), default=None)


def _has_plain_head(model: Any) -> bool:
    """Whether logits are the output layer's, untouched: some families scale or cap them."""
    head = model.get_output_embeddings()
    if family_of(head) is not nn.Linear:
        return False
    caught: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        logits = call_model(model, _padded(model)).logits
    finally:
        hook.remove()
    return torch.equal(head(caught[-1]), logits)


_LENGTHS = (7, 3, 5)  # more than the window of a short convolution, and all different
_STEPS = 2  # tokens that are decoded one by one


def _takes_packing(model: Any) -> bool:
    """Whether packed rows say what padded ones say; sets the attention that they need."""
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    try:
        padded = call_model(model.base_model, _padded(model)).last_hidden_state
        expected = torch.cat([row[:n] for row, n in zip(padded, _LENGTHS, strict=True)])
        with _attention(model, ATTENTION) as set_for_good:
            found = call_model(model.base_model, _in_one_row(model)).last_hidden_state[0]
            same = alike(found, expected)
            if same:
                set_for_good()
        return same
    except CANNOT:
        return False  # its attention is asked for something that packed rows do not know


def _takes_slots(model: Any) -> bool:
    """Whether decoding in slots says what a pass over everything says."""
    if model.get_output_embeddings() is None or _turns_with_length(model.config):
        return False
    inputs = _padded(model)
    try:
        expected = call_model(model, inputs).logits
        found = _in_slots(model, inputs)
    except CANNOT:
        return False
    places = torch.tensor(_LENGTHS) - 1 - _STEPS
    rows = torch.arange(len(_LENGTHS))
    return all(alike(step, expected[rows, places + n]) for n, step in enumerate(found))


def _turns_with_length(config: Any) -> bool:
    """Whether positions depend on the longest row of a call, so on a slot's neighbours."""
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    return any(part.get("rope_type") in ("dynamic", "longrope") for part in parts)


def _in_slots(model: Any, inputs: ModelInputs) -> list[Tensor]:
    """Logits after all but the last tokens of each sequence, and after each of those in turn."""
    lengths, rows = torch.tensor(_LENGTHS) - _STEPS, torch.arange(len(_LENGTHS))
    slots = KeyValueSlots(len(_LENGTHS), max(_LENGTHS))
    width = inputs.input_ids.shape[1]
    mask = torch.arange(width) < lengths[:, None]
    found = [read_prompts(model, inputs.input_ids, mask, slots, rows)]
    for n in range(_STEPS):
        ids = inputs.input_ids[rows, lengths + n]
        found.append(step_slots(model, ids, lengths + n, slots))
    return found


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs differ by rounding at most."""
    tolerance = _TOLERANCE.get(expected.dtype, _COARSE_TOLERANCE)
    error = (found - expected).square().mean().sqrt()
    return bool(error <= tolerance * expected.std().clamp_min(1e-6))


@contextmanager
def _attention(model: Any, name: str) -> Iterator[Any]:
    """Give a model another attention, and take it away again unless it is kept."""
    before, kept = model.config._attn_implementation, []
    model.set_attn_implementation(name)
    try:
        yield lambda: kept.append(True)
    finally:
        if not kept:
            model.set_attn_implementation(before)


def _padded(model: Any) -> ModelInputs:
    lengths = torch.tensor(_LENGTHS)
    mask = torch.arange(max(_LENGTHS)) < lengths[:, None]
    ids = _ids(model)
    grid = torch.zeros_like(mask, dtype=torch.long).masked_scatter(mask, ids)
    return ModelInputs(grid, mask.long(), position_ids(mask))


def _in_one_row(model: Any) -> ModelInputs:
    lengths = torch.tensor(_LENGTHS)
    positions = torch.cat([torch.arange(n) for n in _LENGTHS])
    return packed_inputs(_ids(model), positions, Packing.of(lengths))


def _ids(model: Any) -> Tensor:
    return torch.arange(1, sum(_LENGTHS) + 1) % embedding_rows(model)
