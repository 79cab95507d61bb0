"""One way to call a transformers model, whatever its family calls things."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo_lightning.models.attention import Packing


class ModelInputs(NamedTuple):
    """Input of one forward pass.

    Attributes:
        input_ids: ``[B, S]``, packed ``[1, T]``. Long.
        attention_mask: 1 on real tokens; of packed rows not read. ``[B, S]`` long.
        position_ids: Shaped like ``input_ids``. Long.
        packing: Of rows that lie one after the other, without padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    packing: Packing | None = None


def packed_inputs(input_ids: Tensor, position_ids: Tensor, packing: Packing) -> ModelInputs:
    """Make the input of a packed row.

    Args:
        input_ids: ``[T]`` long.
        position_ids: ``[T]`` long.
        packing: Of the T tokens.
    """
    # A mask of four dimensions is one that is made already; transformers makes none beside it.
    made = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
    return ModelInputs(input_ids[None], made, position_ids[None], packing)


Forward = Callable[[Tensor], Tensor]
"""Of a layer with one input."""


@contextmanager
def replaced_forward(layer: nn.Module, new: Callable[..., Any]) -> Iterator[None]:
    """Put something in the place of a layer's ``forward``, and put back what was there.

    The layer is still called as a module, so what watches it (sharding, say) goes on to do so.

    Args:
        layer: Of any inputs.
        new: Gets the former ``forward`` and the inputs.
    """
    own, before = vars(layer).get("forward"), layer.forward
    layer.forward = partial(new, before)
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


def forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    """Name the arguments of a model's forward pass."""
    return _parameters(model_class.forward)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Look a signature up once: it takes as long as a tiny model's layer."""
    return frozenset(inspect.signature(function).parameters)


_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(model: nn.Module) -> str:
    """Name the argument by which a model's family and release take a cache."""
    known = forward_parameters(type(model))
    return next((name for name in _CACHE_NAMES if name in known), "past_key_values")


def call_model(model: nn.Module, inputs: ModelInputs, **options: Any) -> Any:
    """Run a transformers model with the options that its family knows, by itself without a cache.

    Families without ``position_ids`` (ALiBi, recurrent ones) read the attention mask instead.
    """
    known = forward_parameters(type(model))
    options = {"position_ids": inputs.position_ids, "use_cache": False, **options}
    packing = {} if inputs.packing is None else {"packing": inputs.packing}
    return model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        **{name: value for name, value in options.items() if name in known},
        **packing,
    )
