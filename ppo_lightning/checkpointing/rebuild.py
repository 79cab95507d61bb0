"""From what a checkpoint holds to the networks themselves.

A checkpoint holds the weights that were trained and the settings that the networks were built with;
frozen weights come from their source again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ppo_lightning.checkpointing.contents import CheckpointModels
from ppo_lightning.errors import CheckpointError
from ppo_lightning.models import (
    ValueNetwork,
    attach_lora,
    fingerprint,
    is_adapted,
    load_causal_lm,
    load_value_network,
    merged_copy,
    trained_weights,
)

_ACTOR = "networks.actor."
_CRITIC = "networks.critic."
_VALUE_HEAD = "networks.value_head."


def load_actor(models: CheckpointModels, *, ema: bool = False) -> nn.Module:
    """Build the actor and load its trained weights; adapters are left on it.

    Args:
        models: From ``read_models``.
        ema: Take the average of its weights (callback ``ActorEMA``) instead of the last ones.

    Raises:
        CheckpointError: Weights are missing, or the frozen ones have changed.
        ModelError: The starting model cannot be loaded.
    """
    if ema and not models.ema:
        raise CheckpointError(
            f"`{models.path}` holds no average of the actor's weights: train with the callback "
            "`ppo_lightning.callbacks.ActorEMA`, or leave out `--ema`."
        )
    policy = replace(models.policy, gradient_checkpointing=False, compile=False)
    actor: nn.Module = load_causal_lm(policy)
    if policy.lora is not None:
        actor = attach_lora(actor, policy.lora)  # type: ignore[arg-type]
    if models.fingerprint:
        _check_frozen(actor, models)
    load_trained(actor, models.weights_of(_ACTOR), models)
    if ema:
        _load_average(actor, models)
    return actor.eval()


def load_critic(models: CheckpointModels, actor: nn.Module | None = None) -> ValueNetwork:
    """Build the critic and load its trained weights.

    Args:
        models: From ``read_models``.
        actor: From ``load_actor``; needed where the critic is a head on its trunk, which is then
            shared, or copied and merged where it has adapters.

    Raises:
        CheckpointError: Weights are missing.
        ModelError: The starting model cannot be loaded.
    """
    if models.critic.kind == "separate":
        settings = replace(models.critic, gradient_checkpointing=False, compile=False)
        critic = load_value_network(settings, replace(models.policy, gradient_checkpointing=False))
        load_trained(critic, models.weights_of(_CRITIC), models)
        critic.eval()
        return critic
    if actor is None:
        raise ValueError("`actor` is needed: the critic is a head on its trunk.")
    trunk: Any = merged_copy(actor) if is_adapted(actor) else actor
    critic = ValueNetwork.from_causal_lm(trunk, head_init="zero")
    load_trained(critic.head, models.weights_of(_VALUE_HEAD), models)
    critic.eval()
    return critic


class Origin(Protocol):
    """Where weights come from, for messages."""

    @property
    def path(self) -> Path:
        """The checkpoint."""

    @property
    def source(self) -> str:
        """Path of the model that the training began with."""


def load_trained(module: nn.Module, weights: Mapping[str, Tensor], models: Origin) -> None:
    """Load every trained weight; only frozen ones may be left as they are.

    Args:
        module: Freshly built.
        weights: By their names in it.
        models: Of the checkpoint.

    Raises:
        CheckpointError: One is missing, unknown or of another shape.
    """
    _check_shapes(module, weights, models)
    report = module.load_state_dict(dict(weights), strict=False)
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    missing = [name for name in report.missing_keys if name not in frozen]
    if missing or report.unexpected_keys:
        name = (missing or report.unexpected_keys)[0]
        what = "lacks" if missing else "has the unknown weight"
        raise CheckpointError(
            f"`{models.path}` {what} `{name}`: it does not fit the model that it names, "
            f"`{models.source}`."
        )


def _check_shapes(module: nn.Module, weights: Mapping[str, Tensor], models: Origin) -> None:
    """Refuse another architecture before torch lists each of its weights."""
    for name, weight in module.state_dict().items():
        found = weights.get(name)
        if found is not None and found.shape != weight.shape:
            raise CheckpointError(
                f"`{models.path}` does not fit `{models.source}`: `{name}` is "
                f"{list(found.shape)} in the checkpoint and {list(weight.shape)} in the model. "
                "Give the folder of the model that was trained as `--policy-path`."
            )


@torch.no_grad()
def _load_average(actor: nn.Module, models: CheckpointModels) -> None:
    """Put the average in the place of every trained weight; tied weights follow."""
    trained = trained_weights(actor)
    if {k: v.shape for k, v in trained.items()} != {k: v.shape for k, v in models.ema.items()}:
        raise CheckpointError(
            f"the average of the actor's weights in `{models.path}` does not fit its actor."
        )
    for name, weight in trained.items():
        weight.copy_(models.ema[name])


def _check_frozen(actor: nn.Module, models: CheckpointModels) -> None:
    """Compare the frozen weights by their names in the LightningModule."""
    networks = nn.ModuleDict({"actor": actor})
    check_frozen(nn.ModuleDict({"networks": networks}), models.fingerprint, models)


def check_frozen(module: nn.Module, expected: str, models: Origin) -> None:
    """Insist that weights which were not trained are those of the run.

    Args:
        module: With the names of the LightningModule.
        expected: Their fingerprint in the checkpoint.
        models: Of the checkpoint.

    Raises:
        CheckpointError: They are others.
    """
    if fingerprint(module) != expected:
        raise CheckpointError(
            f"the weights of `{models.source}` differ from those that `{models.path}` was "
            "trained on. Give the folder of the right model as `--policy-path`."
        )
