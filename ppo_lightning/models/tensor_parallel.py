"""Layers cut over the ranks of a replica: tensor parallel, as the family's own plan has it.

Attention heads and the inner features of feed-forward layers are shared out; each rank computes its
own and adds the results up with the others (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ppo_lightning.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BLOCK = "layers.*."  # how plans of transformers begin
_COUNTS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def split_layers(model: nn.Module, blocks: Sequence[str], mesh: DeviceMesh) -> None:
    """Cut the linear layers of all blocks over the ranks of a replica, in place.

    Args:
        model: Of transformers, with or without adapters on its layers.
        blocks: Names of the blocks.
        mesh: Of these ranks, one-dimensional.

    Raises:
        ModelError: The family has no plan for it, or one of more than columns and rows; or heads or
            features cannot be shared out evenly.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan = _plan_of(model)
    _require_even(model, mesh.size())
    for block in blocks:
        part = model.get_submodule(block)
        parallelize_module(part, mesh, _styles(part, plan))


def _plan_of(model: Any) -> dict[str, str]:
    """By the name of a layer in a block: ``colwise`` or ``rowwise``."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    known = all(k.startswith(_BLOCK) and v in ("colwise", "rowwise") for k, v in plan.items())
    if not plan or not known:
        what = "has none" if not plan else "has one that this version does not know"
        raise ModelError(
            f"`tensor_parallel_size`: a {type(model).__name__} needs a plan that says how its "
            f"layers are cut, and {what}. Leave it out; Llama, Qwen2 and Mistral have one."
        )
    return {name.removeprefix(_BLOCK): style for name, style in plan.items()}


def _require_even(model: Any, ranks: int) -> None:
    for name in _COUNTS:
        count = getattr(model.config, name, None)
        if count is not None and count % ranks:
            raise ModelError(
                f"`tensor_parallel_size` ({ranks}) must divide `{name}` of a "
                f"{type(model).__name__} ({count})."
            )


def _styles(block: nn.Module, plan: dict[str, str]) -> dict[str, Any]:
    """How each layer of a block is cut, those of adapters with it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles: dict[str, Any] = {}
    for name, style in plan.items():
        make = ColwiseParallel if style == "colwise" else RowwiseParallel
        layer: Any = block.get_submodule(name)
        if not hasattr(layer, "base_layer"):
            styles[name] = make()
            continue
        styles[f"{name}.base_layer"] = make()
        # Of the two factors the one on the side that is cut.
        factor = "lora_B" if style == "colwise" else "lora_A"
        styles |= {f"{name}.{factor}.{key}": make() for key in getattr(layer, factor)}
    return styles
