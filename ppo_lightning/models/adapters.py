"""Low-rank adapters (PEFT): attach, switch off, merge for export, and tell their weights apart.

PEFT is imported where it is needed: a model can only carry an adapter if somebody has done so.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_lightning.configs import LoraConfig
from ppo_lightning.errors import ModelError, nearest
from ppo_lightning.models.settings import keep_settings, settings_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ORIGINAL = "_original"

# PEFT imports bitsandbytes where it is installed, which warns of an operation that it lacks on CPUs
# and that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def attach_lora(model: PreTrainedModel, config: LoraConfig, *, generates: bool = True) -> PeftModel:
    """Add low-rank adapters and freeze everything else.

    The adapters start as the identity, so the adapted model first equals the model. They have no
    dropout: in reinforcement learning it would turn every ratio into noise. They are float32 on a
    model of a coarser dtype.

    Args:
        model: Changed in place.
        config: Rank, scale and layers.
        generates: False for a model without a language model's head.

    Raises:
        ModelError: A layer of ``target_modules`` shares its weights with another one, or takes no
            adapter; or a name in it is no layer's.
        ValueError: None of them lies in the last ``layers`` blocks, or there are not so many.
    """
    import peft

    _refuse_unknown(model, config.target_modules)
    _refuse_tied(model, config.target_modules)
    targets = config.target_modules if config.layers is None else _in_last_blocks(model, config)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM if generates else peft.TaskType.FEATURE_EXTRACTION,
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        fan_in_fan_out=_is_transposed(model),
    )
    try:
        with quiet_peft():
            adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=True)
    except ValueError as error:  # a layer of a kind that PEFT has no adapter for
        raise ModelError(f"`lora.target_modules` {targets!r}: {error}") from error
    assert isinstance(adapted, peft.PeftModel)
    return adapted


def _refuse_unknown(model: PreTrainedModel, targets: str | Sequence[str]) -> None:
    """PEFT takes a list if a single name in it fits; the misspelt ones would not be trained."""
    layers = dict(model.named_modules())
    asked = [targets] if isinstance(targets, str) else [[name] for name in targets]
    for part in asked:
        if not any(_is_target(name, layer, part) for name, layer in layers.items()):
            linear = [name for name, layer in layers.items() if _is_linear(layer)]
            raise ModelError(_unknown_target(part, linear))


def _unknown_target(target: str | Sequence[str], linear: Sequence[str]) -> str:
    """Say which names there are.

    Args:
        target: A pattern, or a list of one name.
        linear: Names of all linear layers, in full.
    """
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    name = target if isinstance(target, str) else target[0]
    near = nearest(name, known)
    hint = f"did you mean `{near}`? " if near else ""
    pattern = " A text is a pattern for names in full, such as `{}`; for last names give a list."
    return (
        f"`lora.target_modules`: no layer is called `{name}`; {hint}There are: {', '.join(known)}."
        f"{pattern.format(linear[0]) if isinstance(target, str) else ''}"
    )


def _refuse_tied(model: PreTrainedModel, targets: str | Sequence[str]) -> None:
    """An adapter on one of two tied layers would, once merged, move the other as well."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    if targets == "all-linear" or None in ends or ends[0].weight is not ends[1].weight:
        return
    for name, module in model.named_modules():
        if module in ends and _is_target(name, module, targets):
            raise ModelError(
                f"`lora.target_modules` names `{name}`, whose weights are those of the other end "
                "of the model too (tied embeddings): merged for export, its adapter would change "
                "both. Leave it out."
            )


def _in_last_blocks(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Name the layers of the last blocks in full, which PEFT takes as they are.

    PEFT's own `layers_to_transform` does nothing beside `all-linear`.
    """
    assert config.layers is not None
    blocks = block_names(model)
    if config.layers > len(blocks):
        raise ValueError(
            f"`lora.layers` must be at most {len(blocks)}, the blocks of this model, "
            f"got {config.layers}."
        )
    kept = tuple(f"{name}." for name in blocks[-config.layers :])
    found = [
        name
        for name, module in model.named_modules()
        if name.startswith(kept) and _is_target(name, module, config.target_modules)
    ]
    if not found:
        raise ValueError(
            f"`lora.target_modules` {config.target_modules!r} names no layer in the last "
            f"{config.layers} blocks."
        )
    return found


def block_names(model: PreTrainedModel, *, setting: str = "lora.layers") -> list[str]:
    """Name the transformer blocks, first to last.

    Args:
        model: Of transformers.
        setting: That needs them, for the message.

    Raises:
        ValueError: They are not one list.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return [f"{name}.{number}" for number in range(len(module))]
    raise ValueError(f"`{setting}`: this model's blocks are not one list; leave it out.")


def _is_target(name: str, module: nn.Module, targets: str | Sequence[str]) -> bool:
    """Whether PEFT would take a layer for one of ``target_modules``."""
    if targets == "all-linear":
        return _is_linear(module)
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return name in targets or name.endswith(tuple(f".{target}" for target in targets))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence that PEFT asks transformers for a property by its former name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def is_adapted(model: nn.Module) -> bool:
    """Whether the model carries an adapter."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_causal_lm(model: nn.Module) -> nn.Module:
    """Return the transformers model itself; its adapter layers, if any, still act.

    PEFT's wrapper adds nothing for LoRA but time.
    """
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off, and put every layer back as it was, also after an exception.

    PEFT's own switch touches ``requires_grad`` of the adapter's weights, which would undo a freeze
    and upset sharding; a layer only looks at this flag.
    """
    layers = [layer for _, layer in adapter_layers(model)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, flag in zip(layers, before, strict=True):
            layer._disable_adapters = flag


def keep_original(model: nn.Module, load: Callable[[], PreTrainedModel]) -> None:
    """Remember where a quantised model's weights are to be had as they were.

    Args:
        model: Of transformers.
        load: Loads them, on the CPU.
    """
    setattr(model, _ORIGINAL, load)


def merged_copy(model: nn.Module) -> PreTrainedModel:
    """Return a plain model with the adapter worked into the weights; ``model`` stays as it is.

    Those are the original weights where the model's are quantised.

    Raises:
        ValueError: The model carries no adapter.
        ModelError: The original weights are not there any more.
    """
    if not is_adapted(model):
        raise ValueError(f"`model` is a {type(model).__name__} without an adapter to merge.")
    load: Callable[[], PreTrainedModel] | None
    load = getattr(base_causal_lm(model), _ORIGINAL, None)
    adapted: Any = copy.deepcopy(model) if load is None else _on_original(model, load())
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged


@torch.no_grad()
def _on_original(model: Any, plain: PreTrainedModel) -> PeftModel:
    """Put a quantised model's adapters on the weights that it was made of."""
    import peft

    base: Any = base_causal_lm(model)
    keep_settings(plain, settings_of(base))  # with what has been added since, such as an end id
    plain.generation_config = base.generation_config
    settings = copy.copy(model.peft_config["default"])
    settings.fan_in_fan_out = _is_transposed(plain)
    with quiet_peft():
        adapted = peft.get_peft_model(plain, settings, autocast_adapter_dtype=True)
    assert isinstance(adapted, peft.PeftModel)
    own = dict(model.named_parameters())
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            weight.copy_(own[name])
    return adapted


def _is_transposed(model: nn.Module) -> bool:
    """Whether weights are kept as GPT-2 does; PEFT warns if it is not told."""
    return any(isinstance(module, Conv1D) for module in model.modules())


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer that an adapter acts on, by name."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for name, part in model.named_modules():
        if isinstance(part, tuners.BaseTunerLayer):
            yield name, part
