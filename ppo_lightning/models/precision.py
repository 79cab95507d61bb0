"""Frozen weights in eight bits or four: a quarter, or an eighth, of float32's memory."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_lightning.configs import Quantization
from ppo_lightning.errors import ModelError
from ppo_lightning.functional import linear
from ppo_lightning.models.fused import family_of

_LEVELS = 127  # of either sign: -128 is left out, so that a weight and its negative round alike
_BLOCK = 64  # numbers that share a scale, as in QLoRA


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weights are made anew whenever they are needed.

    Also in the backward pass, so that nothing but the small weights is kept for it. Inputs,
    products and outputs have the input's own dtype, under autocast that of autocast. An adapter may
    be put on it. Scales are kept as their bits, in an integer dtype: whatever converts a model's
    weights would round them.

    Args:
        weight: ``[O, I]`` float.
        bias: ``[O]`` float, or None.
    """

    scale: nn.Parameter

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rows, columns = weight.shape
        super().__init__(columns, rows, bias=False, device="meta")
        small, scale = self.quantised(weight.detach())
        self.weight = _frozen(small)
        self.scale = _frozen(scale.view(torch.int32))
        if bias is not None:
            self.bias = _frozen(bias.detach().clone())

    @abstractmethod
    def quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is kept of weights ``[O, I]``, and scales in float32."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights. ``[O, I]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        found = self.product(x.to(_arithmetic(x)))
        return found if self.bias is None else found + self.bias.to(found.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ`` in the dtype of ``x``."""
        found: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return found


class Int8Linear(QuantisedLinear):
    """Weights are whole numbers from -127 to 127, times a scale for each row.

    Each weight is off by half a step of its row at most: ``max|row| / 254``. An output is therefore
    off by no more than that times ``Σ|x|``. No integer arithmetic is involved, so it runs wherever
    torch does.

    Args:
        weight: ``[O, I]`` float.
        bias: ``[O]`` float, or None.
    """

    def quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[O, I]`` int8 and ``[O]`` float32."""
        return quantised_rows(weight)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights."""
        # Scaled before the product: sums of whole numbers are too large for float16.
        return self.weight.to(dtype).mul_(self.scale.view(torch.float32).to(dtype)[:, None])


class NF4Linear(QuantisedLinear):
    """Weights are four bits each: one of 16 quantiles of a normal, times a scale for 64 in a row.

    ``bitsandbytes`` packs and unpacks them. Weights on the device ``meta`` need no package, and
    unpack to numbers without contents.

    Args:
        weight: ``[O, I]`` float.
        bias: ``[O]`` float, or None.

    Raises:
        ModelError: The package is not installed.

    Source:
        Dettmers et al. 2023, arXiv:2305.14314, section 3.
    """

    def quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[⌈O·I / 2⌉, 1]`` bytes, and float32 scales of blocks."""
        self._blank = weight.is_meta
        if self._blank:
            sizes = -(-weight.numel() // 2), -(-weight.numel() // _BLOCK)
            packed = weight.new_empty((sizes[0], 1), dtype=torch.uint8)
            return packed, weight.new_empty(sizes[1], dtype=torch.float32)
        packed, state = _bitsandbytes().quantize_4bit(
            weight.float().contiguous(), blocksize=_BLOCK, quant_type="nf4"
        )
        return packed, state.absmax

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights."""
        shape = torch.Size((self.out_features, self.in_features))
        if self._blank:
            return self.weight.new_empty(shape, dtype=dtype)
        package = _bitsandbytes()
        state = package.QuantState(
            absmax=self.scale.view(torch.float32),
            shape=shape,
            dtype=torch.float32 if dtype == torch.float64 else dtype,
            blocksize=_BLOCK,
            quant_type="nf4",
        )
        unpacked: Tensor = package.dequantize_4bit(self.weight, state)
        return unpacked.to(dtype)


class _Product(torch.autograd.Function):
    """Multiply by weights that are made for each pass, and kept for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return linear(grad, ctx.layer.dense(grad.dtype).t()), None


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


_LAYERS: dict[Quantization, type[QuantisedLinear]] = {"int8": Int8Linear, "nf4": NF4Linear}


def quantise_linears(model: nn.Module, quantization: Quantization) -> int:
    """Replace the linear layers of a frozen model's trunk by quantised ones, in place.

    Embeddings, norms and the head that reads scores or logits out stay as they are: they are small,
    or what is read hangs on them directly.

    Args:
        model: Of transformers.
        quantization: Of the layers.

    Returns:
        Number of layers that were replaced.

    Raises:
        ModelError: There is no linear layer in the trunk, or a package is missing.
    """
    of: Any = model
    trunk: nn.Module = of.base_model
    places = [
        (parent, name)
        for parent in list(trunk.modules())
        for name, layer in parent.named_children()
        if _weights_of(layer) is not None
    ]
    if not places:
        raise ModelError(
            f"`quantization: {quantization}` finds no linear layer in {type(model).__name__}. "
            "Leave it out."
        )
    for parent, name in places:
        layer = getattr(parent, name)
        weight = _weights_of(layer)
        assert weight is not None
        setattr(parent, name, _LAYERS[quantization](weight, layer.bias))
    return len(places)


def _weights_of(layer: Any) -> Tensor | None:
    """Return a linear layer's weights as ``[O, I]``; None for anything else, subclasses too."""
    weight: Tensor | None = None
    if family_of(layer) is nn.Linear:
        weight = layer.weight
    elif family_of(layer) is Conv1D:  # GPT-2's linear layer, which keeps them the other way round
        weight = layer.weight.T
    return weight


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _arithmetic(x: Tensor) -> torch.dtype:
    """Dtype that a linear layer computes in."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _bitsandbytes() -> Any:
    try:
        from bitsandbytes import functional as package
    except ImportError as error:
        raise ModelError(
            "`quantization: nf4` needs the package `bitsandbytes`: `pip install "
            "'ppo-lightning[qlora]'`. `int8` needs none."
        ) from error
    return package
