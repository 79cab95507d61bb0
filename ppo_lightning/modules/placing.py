"""An optimiser's states, brought to where its parameters lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ppo_lightning.checkpointing import Stored, made_whole
from ppo_lightning.distributed import as_shard, is_part, is_shard, local, local_block, placed_like


def brought(value: Tensor | Stored, like: Tensor) -> Tensor:
    """Bring a tensor to where another lies; of one on the disk, only this rank's part is read.

    Args:
        value: See ``placed_like``; or stored, of the shape of ``like``.
        like: A tensor, maybe in shards.
    """
    if isinstance(value, Tensor):
        return placed_like(value, like)
    if not is_shard(like):
        return value.whole().to(like.device)
    return as_shard(value.read(*local_block(like)).to(like.device), like)  # type: ignore[arg-type]


def states_placed(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Bring an optimiser's states to where its parameters lie, which may be in shards.

    Args:
        state: ``state_dict`` of an optimiser of the same groups. Its tensors are whole, or this
            rank's parts, or stored.
        optimizer: Gets them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(is_part(parameter) for parameter in parameters):
        return dict(state)  # it is taken apart by the optimiser

    def placed(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor | Stored):
            return value
        of_weights = value.shape in (parameter.shape, local(parameter.detach()).shape)
        return brought(value, parameter) if of_weights else made_whole(value)

    entries = {
        number: {key: placed(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}
