"""RMS norms with a backward pass of their own, in the place of a family's.

A family writes its norm in five operations. Here the input and one number a row are kept. What is
not float32 is left to the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ppo_lightning.functional import autocast_off
from ppo_lightning.models.fused.classes import Fused, FusedLayer, agree, derived

_Norm = Callable[[Tensor, Tensor, float], Tensor]


def fuse_norms(model: nn.Module) -> None:
    """Replace the norms of a model that has just been loaded, each that can be.

    One that scales by ``1 + weight``, say, fails the trial and is left.

    Args:
        model: Its weights may lie on the device ``meta``.
    """
    for module in model.modules():
        if _looks_like_a_norm(module) and _agrees(module):
            module.__class__ = derived(FusedNorm, type(module))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide rows by their root mean square and scale them.

    It can be differentiated once.

    Args:
        x: ``[..., H]`` float32.
        weight: ``[H]`` float32.
        eps: Added to the mean square.
    """
    if torch.is_grad_enabled():
        normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return normed
    return _normed(x, weight, eps)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        of_x = of_weight = None
        plain = x * scale
        product = grad * plain
        with autocast_off(x.device.type):  # it would round the products
            if ctx.needs_input_grad[0]:
                mean = (product @ weight)[..., None] / x.shape[-1]
                of_x = (grad * weight).addcmul_(plain, mean, value=-1).mul_(scale)
            if ctx.needs_input_grad[1]:
                rows = product.reshape(-1, len(weight))
                of_weight = rows.new_ones(len(rows)) @ rows  # several times as fast as a sum
        return of_x, of_weight, None


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, bit by bit the families' own, and what each row was multiplied by."""
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, eps)


_BY_DEVICE: dict[str, _Norm] = {
    "cpu": rms_norm,
    "cuda": _torch_rms_norm,  # one kernel each way
}


class FusedNorm(FusedLayer):
    """An RMS norm of the usual kind, which scales by its weight."""

    weight: nn.Parameter

    def fused(self, x: Tensor) -> Tensor | None:
        """Norm in float32; anything else is left to the family."""
        found = _BY_DEVICE.get(x.device.type)
        if found is not None and x.dtype == self.weight.dtype == torch.float32:
            return found(x, self.weight, _eps(self))
        return None


def _eps(module: nn.Module) -> Any:
    own = vars(module)
    return own["variance_epsilon"] if "variance_epsilon" in own else own.get("eps")


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Whether it has the name, the weight and the number of an RMS norm, and nothing besides."""
    if isinstance(module, Fused) or not type(module).__name__.endswith("RMSNorm"):
        return False
    tensors = [*module.named_parameters(), *module.named_buffers()]
    has_weight = [(name, tensor.dim()) for name, tensor in tensors] == [("weight", 1)]
    is_leaf = next(module.children(), None) is None
    return has_weight and is_leaf and isinstance(_eps(module), float)


def _agrees(module: nn.Module) -> bool:
    """Whether every function here gives what a norm gives."""
    eps, size = _eps(module), module.get_parameter("weight").numel()

    def family(x: Tensor, weight: Tensor, _: float) -> Any:
        return functional_call(module, {"weight": weight}, (x,))

    ours = [partial(_tried, norm, size, eps) for norm in _BY_DEVICE.values()]
    return agree(partial(_tried, family, size, eps), ours)


def _tried(norm: _Norm, size: int, eps: float) -> list[Tensor]:
    """Norm a few rows: the result, and the gradients of the rows and of the weight."""
    random = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 1, 3, size, generator=random, device="cpu", dtype=torch.float32)
    x *= torch.tensor([1.0, 30.0, eps**0.5])[:, None]  # and a row that eps matters to
    weight = torch.randn(size, generator=random, device="cpu", dtype=torch.float32)
    with torch.enable_grad():
        x.requires_grad_()
        weight.requires_grad_()
        found = norm(x, weight, eps)
        return [found.detach(), *torch.autograd.grad(found, (x, weight), grad)]
