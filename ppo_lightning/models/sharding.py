"""Which parts of a network lie in shards together."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ppo_lightning.distributed import shard, world_size
from ppo_lightning.errors import ModelError
from ppo_lightning.models.actor_critic import ActorCritic
from ppo_lightning.models.adapters import base_causal_lm, block_names
from ppo_lightning.models.tensor_parallel import split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def shard_model(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model of transformers over ranks, in place: block by block, and the rest.

    Args:
        model: Its blocks are one list; adapters on them are cut as well.
        mesh: With the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        ModelError: Its blocks are not one list, or its layers cannot be cut into so many parts.
    """
    try:
        names = block_names(cast("PreTrainedModel", model))
    except ValueError as error:
        raise ModelError(
            f"a {type(model).__name__} has no one list of blocks that could be cut over ranks: use "
            "`trainer.strategy: ddp`, or leave out `shard` of a reward."
        ) from error
    if mesh["tensor_parallel"].size() > 1:
        split_layers(model, names, mesh["tensor_parallel"])
    shard(model, [model.get_submodule(name) for name in names], mesh["data_parallel"])


def shard_networks(networks: ActorCritic, mesh: DeviceMesh) -> None:
    """Cut actor and critic over ranks, in place; each is put together by its own calls.

    Args:
        networks: Just loaded, on the CPU.
        mesh: With the dimensions ``data_parallel`` and ``tensor_parallel``.

    Raises:
        ModelError: See ``shard_model``.
    """
    shard_model(base_causal_lm(networks.actor), mesh)
    if networks.critic is not None:
        shard_model(networks.critic.backbone, mesh)
    head = networks.value_head if networks.critic is None else networks.critic.head
    assert head is not None
    shard(head, (), mesh["data_parallel"])


def shard_over_all(model: nn.Module, device: torch.device) -> None:
    """Cut a frozen model over all ranks, whichever share a replica; no layer is cut.

    Args:
        model: See ``shard_model``.
        device: Of this rank.

    Raises:
        ModelError: See ``shard_model``.
    """
    from torch.distributed.device_mesh import init_device_mesh

    names = ("data_parallel", "tensor_parallel")
    mesh = init_device_mesh(device.type, (world_size(), 1), mesh_dim_names=names)
    shard_model(model, mesh)
