"""Queries and keys are turned by their position without moving their halves about.

Families of the usual kind share one function for it, by name, which their attention looks up beside
itself. The attention's own code runs on, with ours under that name; nothing outside of the layer
sees the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_lightning.models.fused.classes import Fused, agree, derived

_NAME = "apply_rotary_pos_emb"
_RENAMED = "past_key_values"  # an older name of an argument, which a decorator translates

Turn = Callable[..., tuple[Tensor, Tensor]]
"""Of queries, keys, cosines and sines."""


def fuse_rotary(model: nn.Module) -> None:
    """Replace the attention of a model that has just been loaded, where a trial says so.

    Args:
        model: Its weights may lie on the device ``meta``.
    """
    for module in model.modules():
        plain = _forward_of(type(module))
        if plain is not None and _agrees(plain.__globals__[_NAME]):
            module.__class__ = derived(FusedRotary, type(module))


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of numbers, each of one half of a head and one of the other.

    It can be differentiated once, and not in cosines and sines.

    Args:
        query: ``[B, heads, T, d]`` float32 or float64.
        key: Of fewer heads, maybe.
        cos: ``[B, T, d]`` of the same dtype.
        sin: Likewise.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turn = _Turned.apply if torch.is_grad_enabled() else _turned
    return turn(query, cos, sin), turn(key, cos, sin)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (x, y), (of_x, of_y) = grad.chunk(2, -1), sin.chunk(2, -1)
        result = grad * cos
        first, last = result.chunk(2, -1)
        first += y * of_y
        last -= x * of_x
        return result, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (left, right), (of_left, of_right) = x.chunk(2, -1), sin.chunk(2, -1)
    result = x * cos
    first, last = result.chunk(2, -1)
    first -= right * of_left  # not ``addcmul``: each product is rounded, as a family's is
    last += left * of_right
    return result


class FusedRotary(Fused):
    """An attention whose queries and keys are turned here."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the family's code; compiled code as it is."""
        family: Any = self.family
        is_translated = _RENAMED in options and _RENAMED not in _arguments(family)
        if torch.compiler.is_compiling() or is_translated:
            return super().forward(*args, **options)
        return _rewired(family)(self, *args, **options)


def _forward_of(family: type[nn.Module]) -> FunctionType | None:
    """Return the code of an attention that turns by the function of that name."""
    plain = inspect.unwrap(family.forward)
    if issubclass(family, Fused) or not isinstance(plain, FunctionType):
        return None
    return plain if _NAME in plain.__code__.co_names and _NAME in plain.__globals__ else None


@cache
def _arguments(family: Any) -> frozenset[str]:
    """Names that the code of an attention takes itself."""
    plain = _forward_of(family)
    assert plain is not None
    return frozenset(inspect.signature(plain).parameters)


@cache
def _rewired(family: Any) -> Callable[..., Any]:
    """Let the code of an attention find our function under the name of its family's.

    Other names mean what they meant when this was first called.
    """
    plain = _forward_of(family)
    assert plain is not None
    names = {**plain.__globals__, _NAME: partial(_turn, plain.__globals__[_NAME])}
    made = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _turn(
    family: Turn, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Turn in the dtype that the family would compute in, if that is one in which ours is exact."""
    dtype = torch.promote_types(query.dtype, cos.dtype)
    usual = cos.dim() == 3 and query.shape[-1] == cos.shape[-1] and not (args or options)
    suits = dtype == query.dtype or _promotes(family)
    if not (usual and suits) or dtype not in _EXACT or cos.requires_grad:
        return family(query, key, cos, sin, *args, **options)
    return turned(*(x.to(dtype) for x in (query, key, cos, sin)))


_EXACT = (torch.float32, torch.float64)


@cache
def _promotes(family: Turn) -> bool:
    """Whether a family leaves the result in the finer of two dtypes; some cast it back."""
    states = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16, device="cpu")
    angles = torch.ones(1, 1, 2, dtype=torch.float32, device="cpu")
    return all(found.dtype == torch.float32 for found in family(states, states, angles, angles))


@cache
def _agrees(family: Turn) -> bool:
    """Whether ours gives what a family's function gives, and its gradients, up to rounding."""
    return agree(partial(_tried, family), [partial(_tried, turned)])


def _tried(turn: Turn) -> list[Tensor]:
    """Turn a few queries and keys: the result, and the gradients."""
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    query, key = (drawn(2, heads, 3, 8).requires_grad_() for heads in (4, 2))
    cos, sin = drawn(2, 2, 3, 8)
    with torch.enable_grad():
        found = turn(query, key, cos, sin)
        weights = [drawn(*x.shape) for x in found]
        grads = torch.autograd.grad(found, (query, key), weights)
    return [*(x.detach() for x in found), *grads]
