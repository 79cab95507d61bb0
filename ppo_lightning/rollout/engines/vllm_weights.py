"""What a vLLM is given: plain weights as a Hugging Face folder, or an adapter alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.errors import ModelError
from ppo_lightning.models import base_causal_lm, is_adapted, save_model

_VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """A model as an engine is handed it, seen as what travels.

    Args:
        base: The transformers model; adapter layers inside act, or are switched off.
        adapter: The PEFT model whose adapter travels by itself; None where the adapters that act,
            if any, are worked into the weights.
    """

    base: Any
    adapter: Any | None

    @classmethod
    def of(cls, model: nn.Module, *, merge_adapter: bool) -> GivenWeights:
        """Look at a model.

        Args:
            model: Causal language model of transformers, also with an adapter.
            merge_adapter: Send merged weights even where the adapter could travel alone.
        """
        base = base_causal_lm(model)
        alone = is_adapted(model) and not merge_adapter and any(map(_acts, _layers(base).values()))
        return cls(base=base, adapter=model if alone else None)

    def base_mark(self, policy_version: int) -> tuple[object, ...]:
        """Something else whenever what ``plain`` returns has changed.

        Args:
            policy_version: Counts where the weights are trained.
        """
        acting = [_acts(layer) for layer in _layers(self.base).values()]
        merged = self.adapter is None and any(acting)
        own = set() if merged else _adapter_names(self.base)
        weights = [w for name, w in self.base.named_parameters() if name not in own]
        version = policy_version if any(weight.requires_grad for weight in weights) else None
        return (id(self.base), version, *(acting if merged else ()), *_mark(weights))

    def adapter_mark(self, policy_version: int) -> tuple[object, ...]:
        """Something else whenever the adapter has changed."""
        own = _adapter_names(self.base)
        weights = [weight for name, weight in self.base.named_parameters() if name in own]
        return (policy_version, *_mark(weights))

    @torch.no_grad()
    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights under the names of a model that never had an adapter, on the CPU.

        Tied weights stay one tensor, so that they are written once.

        Args:
            dtype: Of the floating-point ones.
        """
        found: dict[str, Tensor] = {}
        cast: dict[tuple[int, torch.Size], Tensor] = {}
        layers = {} if self.adapter is not None else _layers(self.base)
        skipped = _adapter_names(self.base)
        for name, value in self.base.state_dict().items():
            if name in skipped:
                continue
            owner, inside, rest = name.partition(".base_layer.")
            key = value.data_ptr(), value.shape
            if key not in cast:
                layer = layers.get(owner) if inside and rest == "weight" else None
                cast[key] = _cast(value if layer is None else _merged(layer, value), dtype)
            found[f"{owner}.{rest}" if inside else name] = cast[key]
        return found

    def write_base(self, folder: Path, tokenizer: Any | None, dtype: torch.dtype) -> None:
        """Write the plain weights, the config and the tokenizer as a folder."""
        save_model(self.base, tokenizer, folder, state_dict=self.plain(dtype))

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter, as PEFT does."""
        assert self.adapter is not None
        # PEFT would look for the base on the hub to see whether its vocabulary has grown.
        self.adapter.save_pretrained(str(folder), save_embedding_layers=False)

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of the plain weights."""
        skipped = _adapter_names(self.base)
        return {
            name.replace(".base_layer.", "."): value.shape
            for name, value in self.base.state_dict().items()
            if name not in skipped
        }

    def config(self) -> dict[str, Any]:
        """What the config says of the way the weights are used."""
        return {k: v for k, v in self.base.config.to_dict().items() if k not in _VOLATILE}


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """The model that a vLLM was started with: it takes the weights of no other.

    Args:
        kind: Class of the model.
        shapes: Of its weights, by name.
        config: How they are used.
    """

    kind: str
    shapes: Mapping[str, torch.Size]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, given: GivenWeights) -> KnownModel:
        """Remember what a vLLM is started with."""
        kind = type(given.base).__name__
        return cls(kind=kind, shapes=given.shapes(), config=given.config())

    def require_same(self, given: GivenWeights) -> None:
        """Refuse other weights: vLLM loads what it finds, and only logs what is missing.

        Raises:
            ModelError: Names the weight, or the entry of the config, that differs.
        """
        new = KnownModel.of(given)
        fault = _difference("weight", self.shapes, new.shapes)
        fault = fault or _difference("entry of the config", self.config, new.config)
        if fault is not None:
            raise ModelError(
                f"vLLM was started with a {self.kind} and takes the weights of no other model, but "
                f"was given a {new.kind} {fault}. Leave out `reference.path`, or take "
                "`engine: {class_path: ppo_lightning.rollout.NativeEngine}`."
            )


def check_weights(model: nn.Module) -> None:
    """Refuse weights that cannot be written as an ordinary folder.

    Raises:
        ModelError: Names the model's class and the weight.
    """
    base = base_causal_lm(model)
    if not hasattr(base, "save_pretrained"):
        raise ModelError(
            f"vLLM reads models as Hugging Face folders, and a {type(base).__name__} writes none."
        )
    for name, value in base.state_dict().items():
        if not value.is_floating_point() and name in dict(base.named_parameters()):
            raise ModelError(
                f"vLLM is sent weights in floating point, and `{name}` of the "
                f"{type(base).__name__} is {value.dtype}: leave out its quantisation."
            )


def adapter_rank(model: nn.Module) -> int:
    """Highest rank of the adapters in a model; 0 without any."""
    layers = _layers(base_causal_lm(model)).values()
    return max((rank for layer in layers for rank in layer.r.values()), default=0)


def _difference(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in new:
            return f"without the {what} `{name}`"
        if name not in old:
            return f"with a {what} more, `{name}`"
        if old[name] != new[name]:
            return f"whose {what} `{name}` is {_short(new[name])}, not {_short(old[name])}"
    return None


def _short(value: Any) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else repr(value)


def _layers(base: nn.Module) -> dict[str, Any]:
    """Layers with a low-rank adapter, by name."""
    return {name: part for name, part in base.named_modules() if hasattr(part, "get_delta_weight")}


def _acts(layer: Any) -> bool:
    return not layer.disable_adapters


def _adapter_names(base: nn.Module) -> set[str]:
    """Names of all adapter weights."""
    return {
        f"{owner}.{name}"
        for owner, layer in _layers(base).items()
        for name in layer.state_dict()
        if not name.startswith("base_layer.")
    }


def _mark(weights: Iterable[Tensor]) -> tuple[object, ...]:
    """Every write in place counts a tensor's version up."""
    return tuple((weight.data_ptr(), weight._version) for weight in weights)


def _merged(layer: Any, value: Tensor) -> Tensor:
    """Add what the acting adapters of a layer add to its weight."""
    if layer.disable_adapters:
        return value
    total = value.float()
    for name in layer.active_adapters:
        total = total + layer.get_delta_weight(name).float()
    return total


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to("cpu", dtype if value.is_floating_point() else value.dtype)
