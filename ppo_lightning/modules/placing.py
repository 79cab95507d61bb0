"""An optimiser's states, brought to where its parameters lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ppo_lightning.distributed import local, placed_like


def states_placed(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Bring an optimiser's states to where its parameters lie, which may be in shards.

    Args:
        state: ``state_dict`` of an optimiser of the same groups. Its tensors are whole, or this
            rank's parts.
        optimizer: Gets them.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def placed(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        of_weights = value.shape in (parameter.shape, local(parameter.detach()).shape)
        return placed_like(value, parameter) if of_weights else value

    entries = {
        number: {key: placed(value, parameters[number]) for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}
