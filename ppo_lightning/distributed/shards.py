"""Weights in shards (FSDP2): cut, put together for a while, and read or written whole.

A shard is a ``DTensor``. Nothing here is done to plain tensors, so the same lines serve a run in
which every rank has all weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ppo_lightning.distributed.partitions import (
    has_scattered,
    is_scattered,
    kept_together,
    together,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# torch's own modules for shards take a second to import, and most runs have none: where they have
# not been imported, nothing lies in shards.


def shard(network: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the weights of a network over ranks, in place.

    Args:
        network: Called as a whole; what is in no block is put together with it.
        blocks: Parts of it that are put together one at a time, in the order of their calls.
        mesh: Of the ranks, one-dimensional.
    """
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(network, mesh=mesh, reshard_after_forward=True)


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor lies in shards."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def is_sharded(module: nn.Module) -> bool:
    """Whether a module or a part of it lies in shards."""
    return bool(_parts(module)) or has_scattered(module)


def _parts(*modules: nn.Module) -> list[Any]:
    """Modules that are put together by themselves."""
    found = sys.modules.get("torch.distributed.fsdp")
    if found is None:
        return []
    return [p for module in modules for p in module.modules() if isinstance(p, found.FSDPModule)]


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Put weights together on every rank, and keep them so: passes then wait for no other rank.

    To be called on all ranks; inside, each may run as many passes as it likes. No gradient.

    Args:
        modules: Those in shards; others are left alone.
    """
    parts = _parts(*modules)
    with torch.inference_mode(False), torch.no_grad():  # or no later pass could write to them
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
    try:
        with kept_together(*modules):
            yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
        forget_passes(*modules)


def forget_passes(*modules: nn.Module) -> None:
    """Empty FSDP2's record of forward passes, which else only a backward pass does (torch 2.13).

    Not between a forward pass and its backward.
    """
    for part in _parts(*modules):
        state = part._get_fsdp_state()
        getattr(state._comm_ctx, "post_forward_order", []).clear()  # none before the first pass
        group = state._fsdp_param_group
        if group is not None:
            group._post_forward_indices.clear()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which has its memory; a plain one as it is."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Put a tensor together; to be called on all ranks. A plain one is returned as it is."""
    if is_scattered(tensor):
        return together(tensor)
    return tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def lies_in_rows(tensor: Any) -> bool:
    """Whether ranks have runs of rows of a tensor in shards, in their order."""
    return is_shard(tensor) and tensor.device_mesh.ndim == 1 and tensor.placements[0].is_shard(0)


def num_copies(tensor: Any, ranks: int) -> int:
    """Ranks that have the same part of a tensor in shards as this one.

    Args:
        tensor: In shards.
        ranks: All that there are.
    """
    mesh, parts = tensor.device_mesh, 1
    for place, dimension in zip(tensor.placements, range(mesh.ndim), strict=True):
        parts *= 1 if place.is_replicate() else mesh.size(dimension)  # twice cut, it is no `Shard`
    return ranks // parts


def placed_like(value: Tensor, like: Any) -> Tensor:
    """Bring a tensor to where another lies: to its device, and into shards as it is.

    Args:
        value: The whole, of the shape of ``like`` and the same on all ranks; or this rank's part of
            it, as ``local`` gives it; or in shards, then to be called on all ranks.
        like: A tensor, maybe in shards.
    """
    if not is_shard(like):
        return whole(value).to(like.device)
    if is_shard(value):
        return value
    if value.shape != like.shape:
        return as_shard(value.to(like.device), like)
    offset, size = local_block(like)
    part = value[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return as_shard(part.to(like.device, copy=True), like)


def local_block(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Say where this rank's part of a tensor in shards lies in the whole: offset and size."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(size)


def spans_peers(tensor: Any) -> bool:
    """Whether ranks that hold a model between them have different parts of a tensor in shards."""
    return bool(tensor.device_mesh.ndim > 1)


def as_shard(part: Tensor, like: DTensor) -> Tensor:
    """Make a tensor in shards of this rank's part.

    Args:
        part: Of this rank, as ``local`` gives it.
        like: Of the same shape as the whole.
    """
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
