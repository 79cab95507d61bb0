"""Flat parts of weights, as DeepSpeed's ZeRO gives its optimiser, and weights that lie scattered.

A *part* is a run of numbers of a whole group of weights, laid end to end and cut evenly over ranks;
its gradient and moments are parts, too. In stage 3 the weights themselves are *scattered*: empty on
every rank but where they are put together for a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MARK = "_is_part_of_group"
_FETCHING = (
    "pre_sub_module_forward_function",
    "post_sub_module_forward_function",
    "get_param_coordinator",
)
_offload: Any = None


class _NoOrder:
    """In the place of what has ranks agree, at each pass, on the order of modules."""

    def reset_step(self) -> None:
        """Do nothing."""


def mark_part(tensor: Tensor) -> None:
    """Note that other ranks hold the rest of what a tensor is a part of."""
    setattr(tensor, _MARK, True)


def is_part(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of what a tensor is a part of."""
    return getattr(tensor, _MARK, False)


def is_scattered(tensor: Any) -> bool:
    """Whether a weight is one of ZeRO's stage 3."""
    return hasattr(tensor, "ds_id")


def has_scattered(*modules: nn.Module) -> bool:
    """Whether modules have weights of stage 3."""
    return any(is_scattered(p) for module in modules for p in module.parameters())


def shape_of(tensor: Any) -> torch.Size:
    """Shape of the whole of a tensor."""
    return tensor.ds_shape if is_scattered(tensor) else tensor.shape  # type: ignore[no-any-return]


def use_offload(offload: Any = None) -> None:
    """Say what puts weights of stage 3 together for the passes of modules; None is nothing."""
    global _offload
    _offload = offload


@contextmanager
def kept_together(*modules: nn.Module) -> Iterator[None]:
    """Put weights of stage 3 together on every rank, and keep them so in passes without gradient.

    To be called on all ranks; those that are together stay so. Inside, passes of a module of which
    a weight is still scattered are not possible.
    """
    found = {id(p): p for m in modules for p in m.parameters() if is_scattered(p)}
    with put_together(list(found.values())):
        if not found or _offload is None or _FETCHING[0] in vars(_offload):
            yield
            return
        # What fetches weights, and lets go of them again, would have ranks wait for each other.
        under_way = sys.modules[type(_offload).__module__].FWD_MODULE_STACK
        _offload.pre_sub_module_forward_function = under_way.append
        _offload.post_sub_module_forward_function = lambda module: None
        _offload.get_param_coordinator = _NoOrder
        try:
            yield
        finally:
            for name in _FETCHING:
                delattr(_offload, name)


@contextmanager
def put_together(parameters: list[Any]) -> Iterator[None]:
    """Put weights of stage 3 together on every rank for a while; to be called on all of them.

    Args:
        parameters: Those that already are together are left alone.
    """
    apart = [p for p in parameters if p.numel() != p.ds_numel]
    if not apart:
        yield
        return
    with sys.modules["deepspeed"].zero.GatheredParameters(apart):
        yield


def together(parameter: Any) -> Tensor:
    """Return a copy of the whole of a weight of stage 3; to be called on all ranks."""
    with put_together([parameter]):
        return parameter.detach().clone()  # type: ignore[no-any-return]


def leave_together(module: nn.Module) -> None:
    """Make ordinary weights on the CPU of those of stage 3, one after the other; on all ranks."""
    for parameter in module.parameters():
        if is_scattered(parameter):
            data = together(parameter).cpu()
            for name in [name for name in vars(parameter) if name.startswith("ds_")]:
                delattr(parameter, name)
            parameter.data = data
