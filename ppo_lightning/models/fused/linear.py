"""Linear layers whose products are those of ``functional.linear``."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_lightning.functional import linear, onednn_is_quicker
from ppo_lightning.models.fused.classes import Fused, FusedLayer, derived


def fuse_linear(model: nn.Module) -> None:
    """Replace the linear layers of a model that has just been loaded, subclasses excepted.

    Only where the processor gains by it.

    Args:
        model: Its weights may lie on the device ``meta``.
    """
    if not onednn_is_quicker():
        return
    for module in model.modules():
        kind = _KINDS.get(type(module))
        if kind is not None:
            module.__class__ = derived(kind, type(module))


class FusedLinear(FusedLayer):
    """``torch.nn.Linear``."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def fused(self, x: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        return linear(x, self.weight, self.bias)


class FusedConv1D(FusedLayer):
    """The linear layer of GPT-2, which keeps its weights the other way round."""

    weight: nn.Parameter
    bias: nn.Parameter

    def fused(self, x: Tensor) -> Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        return linear(x, self.weight.t(), self.bias)


_KINDS: dict[type[nn.Module], type[Fused]] = {nn.Linear: FusedLinear, Conv1D: FusedConv1D}
