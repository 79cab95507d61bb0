"""RMS norms with a backward pass of their own, in the place of a family's.

A family writes its norm in five operations, and autograd keeps and reads a tensor for each of them.
Here the input and one number a row are kept. Whether a norm can be replaced is found out by trying;
what is not float32 is left to the family's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

_Norm = Callable[[Tensor, Tensor, float], Tensor]

_CANNOT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_ROUNDING = 1e-5  # of a row; another order of a sum makes a tenth of it


def fuse_layers(model: nn.Module) -> None:
    """Replace the norms of a model that has just been loaded, each that can be.

    A norm stays the object that it is, with its weight and its name; its class becomes one that is
    derived from its own. A norm that scales by ``1 + weight``, say, fails the trial and is left.

    Args:
        model: Its weights may lie on the device ``meta``.
    """
    for module in model.modules():
        if _looks_like_a_norm(module) and _agrees(module):
            module.__class__ = _derived(type(module))


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
        with torch.autocast(x.device.type, enabled=False):  # it would round the products
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


class _Fused(nn.Module):
    """Comes before a family's norm among the bases of a class."""

    family: type[nn.Module]
    weight: nn.Parameter

    def forward(self, *args: Any, **options: Any) -> Any:
        """Norm one tensor in float32 here; anything else, and compiled code, as the family does."""
        if len(args) == 1 and not options and not torch.compiler.is_compiling():
            (x,), weight = args, self.weight
            found = _BY_DEVICE.get(x.device.type)
            if found is not None and x.dtype == weight.dtype == torch.float32:
                return found(x, weight, _eps(self))
        return super().forward(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the family's class: this one cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _empty, (self.family,), *reduced[2:]


_derived_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _derived(family: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of the same name, which messages and ``repr`` go on showing."""
    if family not in _derived_classes:
        names = {"__module__": family.__module__, "__qualname__": family.__qualname__}
        made = type(family.__name__, (_Fused, family), {**names, "family": family})
        _derived_classes[family] = made
    return _derived_classes[family]


def _empty(family: type[nn.Module]) -> nn.Module:
    derived = _derived(family)
    return derived.__new__(derived)


def _eps(module: nn.Module) -> Any:
    own = vars(module)
    return own["variance_epsilon"] if "variance_epsilon" in own else own.get("eps")


def _looks_like_a_norm(module: nn.Module) -> bool:
    """Whether it has the name, the weight and the number of an RMS norm, and nothing besides."""
    if isinstance(module, _Fused) or not type(module).__name__.endswith("RMSNorm"):
        return False
    tensors = [*module.named_parameters(), *module.named_buffers()]
    has_weight = [(name, tensor.dim()) for name, tensor in tensors] == [("weight", 1)]
    is_leaf = next(module.children(), None) is None
    return has_weight and is_leaf and isinstance(_eps(module), float)


def _agrees(module: nn.Module) -> bool:
    """Whether every function here gives what a norm gives, and its gradients, up to rounding."""
    eps, size = _eps(module), module.get_parameter("weight").numel()

    def family(x: Tensor, weight: Tensor, _: float) -> Any:
        return functional_call(module, {"weight": weight}, (x,))

    try:
        expected = _tried(family, size, eps)
        return all(_alike(_tried(norm, size, eps), expected) for norm in _BY_DEVICE.values())
    except _CANNOT:
        return False  # its class wants more than one tensor, or returns something else


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


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and bool(_errors(a, b).max() <= _ROUNDING) for a, b in pairs)


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Each row's error, relative to the row."""
    errors: Tensor = (found - expected).square().sum(-1) / expected.square().sum(-1)
    return errors.sqrt()
