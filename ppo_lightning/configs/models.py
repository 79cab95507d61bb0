"""Which networks take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_fields,
    require_positive,
    require_within,
)

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the actor (PEFT).

    Args:
        rank: Rank of the update.
        alpha: Scale is ``alpha / rank``; None takes twice the rank.
        target_modules: Names of the layers; ``all-linear`` takes every linear layer but the head.
        layers: Only the last so many blocks; None takes all. The backward pass ends at the first
            of them, so a third of the blocks makes an update about 40 % cheaper.
    """

    rank: int = 16
    alpha: float | None = None
    target_modules: str | Sequence[str] = "all-linear"
    layers: int | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("rank", self.rank, 1)
        require_positive("alpha", self.alpha)
        require_at_least("layers", self.layers, 1)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The actor.

    Args:
        path: Folder, hub name, or ``package:NAME`` for weights that a Python package carries.
        dtype: Of the weights. Trained ones must be float32 or float64; the frozen base under
            adapters may be bfloat16 (the adapters are float32 then).
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``; None lets
            transformers choose.
        padding_free: Read the rows of a batch one after the other, so that padding is not computed,
            where the family's attention allows it (found out when the model is loaded, for
            ``sdpa``); false pads them, which is slower and the same up to rounding.
        fused_layers: Norm rows in one operation each way, where the family's RMS norms are of the
            usual kind (found out when the model is loaded); false leaves them to the family's own
            code, which is slower and the same up to rounding.
        lora: Train adapters instead of the weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        compile: Compile the parts of each block with ``torch.compile``, when they are first called;
            needs a C++ compiler, on a GPU Triton too. Sampling runs the plain code.
        trust_remote_code: Run code that a model folder carries.
    """

    path: str
    dtype: DType = "float32"
    attn_implementation: str | None = "sdpa"
    padding_free: bool = True
    fused_layers: bool = True
    lora: LoraConfig | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        require(bool(self.path), "`path` must name a model folder, a hub model or `package:NAME`.")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value network.

    Args:
        kind: ``separate`` is a network of its own, ``shared`` a head on the actor's trunk.
        path: Of a separate critic: causal language model (the head is new) or sequence
            classifier with one output (trunk and head are taken over). None takes the actor's.
        head_init: A new head starts at ``zero`` or normal with deviation 1/sqrt(hidden + 1).
        trunk_grad_scale: Of a shared critic: factor on the gradient into the trunk.
        dtype: Of a separate critic's weights, float32 or float64; None takes the actor's.
        gradient_checkpointing: Recompute a separate critic's activations in the backward pass.
        compile: Compile the parts of each block of a separate critic, as of the policy.
    """

    kind: Literal["separate", "shared"] = "separate"
    path: str | None = None
    head_init: Literal["zero", "normal"] = "zero"
    trunk_grad_scale: float = 1.0
    dtype: DType | None = None
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        require_within("trunk_grad_scale", self.trunk_grad_scale, 0, 1)
        require(
            self.kind == "separate" or self.path is None,
            "`path` belongs to a separate critic; a shared one is a head on the actor's trunk.",
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen model that the KL is measured against.

    Args:
        path: None takes the actor's starting weights: with adapters the actor with its adapter
            switched off, otherwise a second copy.
        dtype: Of a second copy; None takes the actor's.
    """

    path: str | None = None
    dtype: DType | None = None

    def __post_init__(self) -> None:
        require_fields(self)
