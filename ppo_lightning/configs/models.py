"""Which networks take part."""

from __future__ import annotations

import re
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
Quantization = Literal["int8", "nf4"]
Checkpointing = bool | Literal["gates"]


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
        fused_layers: Norm rows in one operation each way, and turn queries and keys without moving
            their halves, where the family's RMS norms and rotary positions are of the usual kind
            (found out when the model is loaded); let linear layers multiply by oneDNN on processors
            of AMD with AVX-512; let the last block leave out tokens that nobody asks about. False
            leaves these layers to the family's own code, which is slower and the same up to
            rounding.
        lora: Train adapters instead of the weights.
        quantization: Keep the frozen linear layers under adapters in eight bits (``int8``) or four
            (``nf4``, QLoRA; needs the package ``bitsandbytes``). They are computed in the dtype of
            what they read, and exports are merged into the weights as they were.
        cache_frozen_trunk: Where nothing trains the first blocks (``lora.layers``), run them once
            over a buffer and keep what they make of it, a hidden state a token: all passes of the
            update begin there, and so does a reference that is the actor with its adapter off
            (whether a family can begin there is found out when the model is loaded); false runs
            these blocks each time, which is slower and the same up to rounding.
        gradient_checkpointing: Recompute activations in the backward pass: all of a block, or with
            ``gates`` what a feed-forward layer makes of its gate alone, where that is
            ``silu(gate) * up``; most of these activations are its, and an update takes a few
            percent longer.
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
    quantization: Quantization | None = None
    cache_frozen_trunk: bool = True
    gradient_checkpointing: Checkpointing = False
    compile: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        require(bool(self.path), "`path` must name a model folder, a hub model or `package:NAME`.")
        require(
            self.quantization is None or self.lora is not None,
            f"`quantization: {self.quantization}` is for frozen weights: set `lora`, which trains "
            "adapters on them, or leave it out.",
        )
        require(
            self.quantization is None or not self.compile,
            f"`compile` does not go with `quantization: {self.quantization}`: leave one of them "
            "out.",
        )
        require_plain_gates(self.gradient_checkpointing, self.compile)


def require_plain_gates(checkpointing: Checkpointing, compiled: bool) -> None:
    """Refuse what would be done in compiled code by the family's way."""
    require(
        checkpointing != "gates" or not compiled,
        "`gradient_checkpointing: gates` and `compile: true` exclude each other: a compiler "
        "chooses what it recomputes.",
    )


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
        gradient_checkpointing: Recompute a separate critic's activations, as of the policy.
        compile: Compile the parts of each block of a separate critic, as of the policy.
    """

    kind: Literal["separate", "shared"] = "separate"
    path: str | None = None
    head_init: Literal["zero", "normal"] = "zero"
    trunk_grad_scale: float = 1.0
    dtype: DType | None = None
    gradient_checkpointing: Checkpointing = False
    compile: bool = False

    def __post_init__(self) -> None:
        require_fields(self)
        require_within("trunk_grad_scale", self.trunk_grad_scale, 0, 1)
        for name in ("gradient_checkpointing", "compile"):
            require(
                self.kind == "separate" or getattr(self, name) is False,
                f"`{name}` is for a separate critic; a head on the actor's trunk follows "
                f"`policy.{name}`.",
            )
        require_plain_gates(self.gradient_checkpointing, self.compile)
        require(
            self.kind == "separate" or self.path is None,
            "`path` belongs to a separate critic; a shared one is a head on the actor's trunk.",
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen model that the KL is measured against.

    Args:
        path: None takes the actor's starting weights: with adapters the actor with its adapter
            switched off, otherwise a second copy, as where one of the others is set.
        dtype: Of a second copy; None takes the actor's.
        quantization: Of a second copy's linear layers: ``int8`` or ``nf4``, as of the policy; None
            leaves them.
        device: Of a second copy: ``auto`` is the run's own; or ``cpu``, which is slower and takes
            nothing of a GPU, or ``cuda:1``.
    """

    path: str | None = None
    dtype: DType | None = None
    quantization: Quantization | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        require_fields(self)
        require(
            self.device == "auto" or re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is not None,
            f"`device` must be auto, cpu, cuda or cuda:NUMBER, got {self.device!r}.",
        )

    def is_start_of(self, policy: PolicyConfig) -> bool:
        """Whether it is the policy as it starts, which is what adapters that are off leave."""
        return (
            self.path is None
            and self.dtype in (None, policy.dtype)
            and self.quantization in (None, policy.quantization)
            and self.device == "auto"
        )
