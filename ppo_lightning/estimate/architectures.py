"""Shapes of published models, so that a run of one can be estimated without a file of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A language model of the Llama family.

    Args:
        layers: Blocks.
        hidden: Width of the hidden states.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_width: Of one head.
        intermediate: Width of the feed-forward layers.
        vocabulary: Tokens.
        tied: Whether the output layer is the embedding.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    tied: bool

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_width", "intermediate"):
            require_at_least(name, getattr(self, name), 1)

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], path: str) -> Architecture:
        """Read a ``config.json``.

        Args:
            settings: What it holds.
            path: Of the model, for messages.

        Raises:
            ValueError: It is of another family.
        """
        require(
            settings.get("model_type") == "llama",
            f"`{path}` is of the family {settings.get('model_type')!r}: tensor parallel is "
            "estimated for Llama's alone. Leave `--tensor-parallel` out, or take an "
            f"`--architecture` of its size: {', '.join(ARCHITECTURES)}.",
        )
        heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
        return cls(
            layers=settings["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=settings.get("num_key_value_heads") or heads,
            head_width=settings.get("head_dim") or hidden // heads,
            intermediate=settings["intermediate_size"],
            vocabulary=settings["vocab_size"],
            tied=settings.get("tie_word_embeddings", False),
        )

    @property
    def block_parameters(self) -> int:
        """Weights of one block: four products of attention, three of the perceptron, two norms."""
        attention = 2 * self.hidden * self.head_width * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def other_parameters(self) -> int:
        """Weights outside the blocks: embedding, output layer where it is another, last norm."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """All weights of the language model."""
        return self.layers * self.block_parameters + self.other_parameters

    @property
    def kv_width(self) -> int:
        """Numbers that are kept of a token for attention: keys and values of all blocks."""
        return 2 * self.layers * self.kv_heads * self.head_width

    def on_one_of(self, tensor: int) -> Architecture:
        """Return what one rank computes where several compute each layer together.

        Heads and the feed-forward width are cut; norms, embedding and output layer are whole on
        every rank.

        Args:
            tensor: Ranks that share a layer.

        Raises:
            ValueError: It does not divide them.

        Source:
            Shoeybi et al. 2019, arXiv:1909.08053, section 3.
        """
        for name in ("heads", "kv_heads", "intermediate"):
            size = getattr(self, name)
            require(
                size % tensor == 0,
                f"`--tensor-parallel {tensor}` does not divide the model's {name} ({size}): "
                f"choose a divisor of {self.kv_heads}.",
            )
        return replace(
            self,
            heads=self.heads // tensor,
            kv_heads=self.kv_heads // tensor,
            intermediate=self.intermediate // tensor,
        )

    def settings(self) -> dict[str, Any]:
        """Return the ``config.json`` of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 131072,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


# `config.json` of meta-llama/Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B; the last two also in
# "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama-3.2-1b": Architecture(
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_width=64,
        intermediate=8192,
        vocabulary=128256,
        tied=True,
    ),
    "llama-3.1-8b": Architecture(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_width=128,
        intermediate=14336,
        vocabulary=128256,
        tied=False,
    ),
    "llama-3.1-70b": Architecture(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        head_width=128,
        intermediate=28672,
        vocabulary=128256,
        tied=False,
    ),
}
"""By the name that ``--architecture`` takes."""


def named_architecture(name: str) -> Architecture:
    """Look an architecture up.

    Raises:
        ValueError: There is none of that name.
    """
    require(
        name.lower() in ARCHITECTURES,
        f"`--architecture {name}` is not known: take one of {', '.join(ARCHITECTURES)}, or name a "
        "folder with a `config.json` as `model.init_args.policy.path`.",
    )
    return ARCHITECTURES[name.lower()]
