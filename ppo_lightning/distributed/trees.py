"""Plain containers with tensors in them, some of which lie in shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.distributed.partitions import is_scattered
from ppo_lightning.distributed.reduce import gather_from_ranks
from ppo_lightning.distributed.shards import is_shard, local, whole


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in plain containers, which are copied.

    Args:
        value: Dictionaries, lists and tuples, with anything in them.
        change: Of one tensor.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def in_shards(value: Any) -> list[Tensor]:
    """Find the tensors in shards, in the order in which ``mapped`` comes to them."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if is_shard(tensor):
            found.append(tensor)
        return tensor

    mapped(value, look)
    return found


def first_of_tied(tensors: Sequence[Tensor]) -> list[int]:
    """Say of tensors in shards which are one: have one memory on every rank.

    To be called on all ranks, which agree: an empty part alone would be like any other.

    Args:
        tensors: The same on all ranks.

    Returns:
        Number of the first one that each is, its own where it is itself.
    """
    parts = [local(tensor.detach()) for tensor in tensors]
    own = [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    everyone = gather_from_ranks([own])
    seen: dict[Any, int] = {}
    return [
        seen.setdefault((tuple(there[n] for there in everyone), tuple(tensor.shape)), n)
        for n, tensor in enumerate(tensors)
    ]


@torch.no_grad()
def whole_on_cpu(value: Any, *, keep: bool) -> Any:
    """Put all tensors in shards together, one after the other, and bring them to the CPU.

    To be called on all ranks, with the same containers. Tied tensors stay tied.

    Args:
        value: Plain containers.
        keep: Whether this rank wants the result; on others such tensors become empty.
    """
    firsts = iter(first_of_tied(in_shards(value)))
    made: dict[int, Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        if is_scattered(tensor):
            return whole(tensor).cpu() if keep else whole(tensor).new_empty(0)
        if not is_shard(tensor):
            return tensor
        number = next(firsts)
        if number not in made:
            found = whole(tensor)
            made[number] = found.cpu() if keep else found.new_empty(0)
        return made[number]

    return mapped(value, change)
