"""Classes that come before a family's own, so that a layer stays what it is in all other ways."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

CANNOT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a family may raise that is asked for something that it does not know."""

_ROUNDING = 1e-5  # of a row; another order of a sum makes a tenth of it


class Fused(nn.Module):
    """Comes before a family's layer among the bases of a class.

    A layer stays the object that it is, with its weights and their names.
    """

    family: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the classes that it is made of: its own cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        (kind,) = (base for base in type(self).__bases__ if issubclass(base, Fused))
        return _empty, (kind, self.family), *reduced[2:]


class FusedLayer(Fused):
    """A layer that takes one tensor."""

    @abstractmethod
    def fused(self, x: Tensor) -> Tensor | None:
        """Do what the family's layer does; None where that is left to it."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Take one tensor here; anything else, and compiled code, goes the family's way."""
        if len(args) == 1 and not options and not torch.compiler.is_compiling():
            found = self.fused(args[0])
            if found is not None:
                return found
        return super().forward(*args, **options)


_made: dict[tuple[type[Fused], type[nn.Module]], type[nn.Module]] = {}


def derived(kind: type[Fused], family: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of the family's name, which messages and ``repr`` go on showing."""
    if (kind, family) not in _made:
        names = {"__module__": family.__module__, "__qualname__": family.__qualname__}
        made = type(family.__name__, (kind, family), {**names, "family": family})
        _made[kind, family] = made
    return _made[kind, family]


def family_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has but for ours, which lies before it."""
    found: type[nn.Module] = vars(type(module)).get("family", type(module))
    return found


def _empty(kind: type[Fused], family: type[nn.Module]) -> nn.Module:
    made = derived(kind, family)
    return made.__new__(made)


def agree(
    expected: Callable[[], Sequence[Tensor]], tried: Sequence[Callable[[], Sequence[Tensor]]]
) -> bool:
    """Whether calls give the same rows up to rounding; what raises does not."""
    try:
        wanted = expected()
        return all(_alike(call(), wanted) for call in tried)
    except CANNOT:
        return False  # its class wants more than one tensor, or returns something else


def _alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and bool(_errors(a, b).max() <= _ROUNDING) for a, b in pairs)


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """Each row's error, relative to the row."""
    errors: Tensor = (found - expected).square().sum(-1) / expected.square().sum(-1)
    return errors.sqrt()
