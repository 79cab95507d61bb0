"""The gate of a block, ``silu(gate) * up``: its results are made a second time, not kept.

A feed-forward layer of width I leaves four tensors ``[T, I]`` for its backward pass; here it leaves
two, for one more SiLU and two more products of their elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from ppo_lightning.models.fused.classes import Fused, FusedLayer, agree, derived

_silu_backward = torch.ops.aten.silu_backward.grad_input


def recompute_gates(model: nn.Module) -> int:
    """Replace the feed-forward layers of a model, each that is of the usual kind.

    Args:
        model: Its weights may lie on the device ``meta``.

    Returns:
        How many have been replaced.
    """
    found = [x for x in model.modules() if _looks_like_a_gate(x) and _agrees(x)]
    for module in found:
        module.__class__ = derived(FusedGate, type(module))
    return len(found)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply ``up`` by the SiLU of ``gate``, of the same shape and dtype.

    It can be differentiated once.
    """
    if torch.is_grad_enabled():
        product: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
        return product
    return silu(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = grad * up
        _silu_backward(of_gate, gate, grad_input=of_gate)
        return of_gate, silu(gate).mul_(grad)


class _Recomputed:
    """What autograd keeps in the place of a product."""

    def __init__(self, gate: Tensor, up: Tensor, like: Tensor) -> None:
        self._factors = gate, up
        self._shape, self._stride = like.shape, like.stride()

    def made(self) -> Tensor:
        gate, up = self._factors
        return silu(gate).mul_(up).as_strided(self._shape, self._stride)


def _recomputed(gate: Tensor, up: Tensor, product: Tensor) -> saved_tensors_hooks:
    """Keep the factors instead of the product, wherever autograd would keep that."""
    factors, wanted = (gate.detach(), up.detach()), _memory(product)

    def pack(x: Tensor) -> Tensor | _Recomputed:
        return _Recomputed(*factors, x) if _memory(x) == wanted else x

    def unpack(kept: Tensor | _Recomputed) -> Tensor:
        return kept.made() if isinstance(kept, _Recomputed) else kept

    return saved_tensors_hooks(pack, unpack)


def _memory(x: Tensor) -> tuple[int, int, torch.dtype]:
    return x.untyped_storage()._cdata, x.numel(), x.dtype


class FusedGate(FusedLayer):
    """A feed-forward layer of the usual kind: ``down(silu(gate(x)) * up(x))``."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def fused(self, x: Tensor) -> Tensor | None:
        """Any of the three may have been replaced since, by one with an adapter, say."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not _match(gate, up):
            return self.down_proj(silu(gate) * up)  # type: ignore[no-any-return]
        product = gated(gate, up)
        with _recomputed(gate, up, product) if product.requires_grad else nullcontext():
            return self.down_proj(product)  # type: ignore[no-any-return]


_LAYERS = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
"""Names, and sizes for a trial."""


def _looks_like_a_gate(module: nn.Module) -> bool:
    """Whether it has three layers and a function, and no weight of its own."""
    if isinstance(module, Fused) or not type(module).__name__.endswith("MLP"):
        return False
    children = {name for name, _ in module.named_children()}
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and children == {*_LAYERS, "act_fn"}


def _agrees(module: nn.Module) -> bool:
    """Try it, in training mode, with small layers in the place of its own."""
    random = torch.Generator().manual_seed(0)
    layers = {name: _small(random, *sizes) for name, sizes in _LAYERS.items()}
    gate, up, down = layers.values()
    twin = copy.copy(module)
    vars(twin).update(_modules={**module._modules, **layers}, training=True)
    x = torch.randn(3, 4, generator=random, device="cpu", dtype=torch.float32)
    x *= torch.tensor([1.0, 30.0, 0.1])[:, None]  # some bound what is large
    with torch.random.fork_rng(devices=()):  # dropout draws
        return agree(
            lambda: _tried(twin, x, layers),
            [lambda: _tried(lambda x: down(gated(gate(x), up(x))), x, layers)],
        )


def _match(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype


def _small(random: torch.Generator, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu").float()
    nn.init.normal_(layer.weight, generator=random)
    return layer


def _tried(
    layer: Callable[[Tensor], Tensor], x: Tensor, layers: dict[str, nn.Linear]
) -> list[Tensor]:
    """Call it on a few rows: the result, and the gradients of the rows and of the weights."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        found = layer(x)
        wanted = (x, *(small.weight for small in layers.values()))
        return [found.detach(), *torch.autograd.grad(found.sum(), wanted)]
