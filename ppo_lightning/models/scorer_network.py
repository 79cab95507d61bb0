"""Reward models in training: from any trunk, with adapters, or with its lower part frozen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ppo_lightning.configs import BackboneConfig, LoraConfig
from ppo_lightning.models.adapters import attach_lora, block_names
from ppo_lightning.models.compiling import compile_blocks
from ppo_lightning.models.loading import enable_checkpointing, load_scorer
from ppo_lightning.models.score_head import head_parameters, in_pooler

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_scorer(config: BackboneConfig, *, keep_dropout: bool = False) -> nn.Module:
    """Load a reward model to be trained; what is not trained has ``requires_grad`` off.

    Args:
        config: Trunk, head, and what is trained.
        keep_dropout: Leave dropout as the folder has it.

    Returns:
        Of transformers or PEFT; see ``base_scorer``.

    Raises:
        ModelError: There is no such model, or it cannot be made a reward model.
        ValueError: It has fewer blocks than are asked for.
    """
    model = load_scorer(config, keep_dropout=keep_dropout)
    network: nn.Module = model
    if config.lora is not None:
        network = _with_adapters(model, config.lora)
    elif config.trainable_layers is not None:
        freeze_below(model, config.trainable_layers)
    enable_checkpointing(model, config.gradient_checkpointing, "backbone")
    if config.compile:
        compile_blocks(model, setting="backbone.compile")
    return network


def _with_adapters(model: PreTrainedModel, config: LoraConfig) -> nn.Module:
    """Adapt the trunk alone, and train the head as it is."""
    if config.target_modules == "all-linear" and config.layers is None:
        # PEFT would take the head for one more layer.
        parts = model.base_model.named_modules()
        trunk = {id(part) for name, part in parts if not in_pooler(name)}
        inside = [
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
            if id(part) in trunk
        ]
        config = replace(config, target_modules=inside)
    head = head_parameters(model)
    adapted = attach_lora(model, config, generates=False)
    for parameter in head:
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()  # steps are lost in a coarser dtype
    return adapted


def freeze_below(model: PreTrainedModel, num_blocks: int) -> None:
    """Train the last blocks, what comes after them, and the head.

    Args:
        model: Sequence classifier of transformers; changed in place.
        num_blocks: 0 trains the head alone.

    Raises:
        ValueError: There are not so many.
    """
    blocks = block_names(model, setting="backbone.trainable_layers")
    if num_blocks > len(blocks):
        raise ValueError(
            f"`backbone.trainable_layers` must be at most {len(blocks)}, the blocks of this model, "
            f"got {num_blocks}."
        )
    first = f"{blocks[-num_blocks]}." if num_blocks else None
    head = {id(p) for p in head_parameters(model)}
    for name, parameter in model.named_parameters():
        if first is not None and name.startswith(first):
            break
        if id(parameter) not in head:
            parameter.requires_grad_(False)


def base_scorer(network: nn.Module) -> PreTrainedModel:
    """Return the classifier of transformers itself; its adapter layers, if any, still act."""
    of: Any = network
    return of.get_base_model() if hasattr(of, "peft_config") else of  # type: ignore[no-any-return]
