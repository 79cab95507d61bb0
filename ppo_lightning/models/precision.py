"""Weights of frozen models in eight bits: a quarter of float32's memory, half of bfloat16's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ppo_lightning.errors import ModelError

_LEVELS = 127  # of either sign: -128 is left out, so that a weight and its negative round alike


class Int8Linear(nn.Module):
    """A linear layer whose weights are whole numbers from -127 to 127, times a scale for each row.

    Each weight is off by half a step of its row at most: ``max|row| / 254``. An output is therefore
    off by no more than that times ``Σ|x|``. Inputs, products and outputs have the input's
    own dtype; no integer arithmetic is involved, so it runs wherever torch does.

    Args:
        weight: ``[O, I]`` float.
        bias: ``[O]`` float, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        steps, scale = quantised_rows(weight)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", steps)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        # The scale belongs to a row of the weights, so it may as well be applied to the output.
        found = functional.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return found if self.bias is None else found + self.bias.to(x.dtype)


def quantised_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 255 even steps that reach to its largest magnitude.

    Args:
        weight: ``[O, I]`` float.

    Returns:
        ``(steps, scale)``: ``[O, I]`` int8, and ``[O]`` float32; their product is near ``weight``.
        A row of zeros gives zeros.
    """
    rows = weight.detach().float()
    scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny * _LEVELS) / _LEVELS
    return (rows / scale[:, None]).round().to(torch.int8), scale


def quantise_linears(model: nn.Module) -> int:
    """Replace the linear layers of a frozen model's trunk by ones of eight bits, in place.

    Embeddings, norms and the head that reads the score out stay as they are: they are small, and
    the score hangs on the head directly.

    Args:
        model: Of transformers.

    Returns:
        Number of layers that were replaced.

    Raises:
        ModelError: There is no linear layer in the trunk.
    """
    of: Any = model
    trunk: nn.Module = of.base_model
    found = [
        (parent, name, layer)
        for parent in list(trunk.modules())
        for name, layer in parent.named_children()
        if _weights_of(layer) is not None
    ]
    if not found:
        raise ModelError(
            f"`quantization: int8` finds no linear layer in {type(model).__name__}. Leave it out."
        )
    for parent, name, layer in found:
        weight = _weights_of(layer)
        assert weight is not None
        bias: Any = layer.bias
        setattr(parent, name, Int8Linear(weight, bias))
    return len(found)


def _weights_of(layer: Any) -> Tensor | None:
    """Return a linear layer's weights as ``[O, I]``; None for anything else, subclasses too."""
    if type(layer) is nn.Linear:
        return layer.weight
    if type(layer) is Conv1D:  # GPT-2's linear layer, which keeps them the other way round
        turned: Tensor = layer.weight.T
        return turned
    return None
