"""Models without weights: shapes and dtypes as they would be loaded, to be counted or tried."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from ppo_lightning.models.attention import ATTENTION
from ppo_lightning.models.frozen_trunk import (
    FrozenTrunk,
    frozen_blocks,
    keep_frozen_trunk,
    learn_frozen_trunk,
    trained_names,
)
from ppo_lightning.models.last_block import keep_narrow_layers, learn_narrow_layers
from ppo_lightning.models.reading import (
    Reading,
    attention_window,
    keep_reading,
    learn_reading,
    reading_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_weightless: ContextVar[bool] = ContextVar("weightless", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Let every loader of this room read configs alone: its models lie on the device ``meta``."""
    token = _weightless.set(True)
    try:
        yield
    finally:
        _weightless.reset(token)


def is_weightless() -> bool:
    """Whether loaders leave the weights out."""
    return _weightless.get()


def skeleton(auto: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    """Make a model of a config on the device ``meta``.

    Args:
        auto: Class of transformers that picks the model's own.
        options: Of ``from_pretrained``; those that are about files are left aside.
    """
    kept = {name: value for name, value in options.items() if name != "output_loading_info"}
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(kept.pop("config"), **kept)
    return model


def guess_reading(model: Any, *, packing: bool, narrow: bool = True) -> Reading:
    """Find out how a model without weights would be read, by trying a small one of its family.

    As ``learn_reading`` does with a model that is loaded. A family whose small model cannot be made
    is read the plain way, which takes the most memory.

    Args:
        model: Language model, or the trunk of one; its attention is set as a loaded one's would be.
        packing: Whether to try to leave padding out.
        narrow: Whether to try to leave tokens out in the last block.
    """
    reading, layers = Reading(), tuple[str, ...]()
    with suppress(*_CANNOT):
        small = _small_model(model)
        reading = learn_reading(small, packing=packing)
        layers = learn_narrow_layers(small) if narrow else ()
    keep_narrow_layers(model, layers)
    if reading.packed:
        model.set_attn_implementation(ATTENTION)
        reading = replace(reading, longest=attention_window(model.config))
    keep_reading(model, reading)
    return reading


def guess_frozen_trunk(model: Any) -> FrozenTrunk | None:
    """Find out behind which blocks a model without weights would begin.

    As ``learn_frozen_trunk`` does with a model that is loaded.

    Args:
        model: Causal language model with what is trained of it; how it is read is known.
    """
    trunk = None
    names, depth = frozen_blocks(model)
    if depth:
        try:
            small = _small_model(model)
            learn_reading(small, packing=reading_of(model).packed)
            small.requires_grad_(False)
            small.get_submodule(frozen_blocks(small)[0][-1]).requires_grad_(True)
            trunk = learn_frozen_trunk(small)
        except _CANNOT:
            trunk = None
    if trunk is not None:
        trunk = replace(trunk, names=names, depth=depth, trained=trained_names(model))
    keep_frozen_trunk(model, trunk)
    return trunk


def _small_model(model: Any) -> PreTrainedModel:
    make: Any = AutoModelForCausalLM.from_config
    small: PreTrainedModel = make(_small(model.config)).eval()
    return small


_CANNOT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_HEADS, _VOCABULARY, _WIDTH = 2, 64, 32


def _small(config: Any) -> Any:
    """Cut a config down to two blocks, two heads of keys and a few tokens."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads = _HEADS * max(1, heads // groups)
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = min(_HEADS, text.num_attention_heads)
    text.hidden_size = size * text.num_attention_heads
    text.vocab_size, text.pad_token_id, text.num_hidden_layers = _VOCABULARY, None, 2
    for name in ("intermediate_size", "n_inner"):
        if getattr(text, name, None):
            setattr(text, name, _WIDTH)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [*dict.fromkeys(kinds), kinds[0]][:2]
    return small
