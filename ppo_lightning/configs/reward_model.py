"""How a reward model is made, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require, require_at_least, require_fields
from ppo_lightning.configs.models import PolicyConfig


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(PolicyConfig):
    """The model that becomes a reward model.

    A causal language model or an encoder gets a new head of one score; a sequence classifier of one
    score is taken with its head, one of several labels without it.

    Args:
        path: Folder, hub name, or ``package:NAME`` for weights that a Python package carries.
        dtype: Of the weights. Trained ones must be float32 or float64; the frozen base under
            adapters may be bfloat16 (the adapters and the head are float32 then).
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``; None lets
            transformers choose.
        padding_free: Of a policy; a reward model is read padded.
        fused_layers: Norm rows in one operation each way, and turn queries and keys without moving
            their halves, where the family's RMS norms and rotary positions are of the usual kind
            (found out when the model is loaded); let linear layers multiply by oneDNN on processors
            of AMD with AVX-512; let the last block leave out all tokens but the last. False leaves
            these layers to the family's own code, which is slower and the same up to rounding.
        lora: Train adapters and the head instead of all weights.
        quantization: Of a policy.
        cache_frozen_trunk: Of a policy.
        gradient_checkpointing: Recompute activations in the backward pass: all of a block, or with
            ``gates`` what a feed-forward layer makes of its gate alone.
        compile: Compile the parts of each block with ``torch.compile``, when they are first called;
            needs a C++ compiler, on a GPU Triton too.
        trust_remote_code: Run code that a model folder carries.
        trainable_layers: Train only the last so many blocks, what comes after them, and the head;
            embeddings and earlier blocks stay as they are. 0 trains the head alone, an encoder's
            pooler included; None all.
        head_init: A new head starts ``normal`` with deviation 1/sqrt(hidden + 1), or at ``zero``:
            every score is 0 and the loss log 2, but the trunk learns nothing before the head does.
    """

    trainable_layers: int | None = None
    head_init: Literal["zero", "normal"] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("trainable_layers", self.trainable_layers, 0)
        require(
            self.quantization is None,
            f"`quantization: {self.quantization}` is for policies; a reward model that is trained "
            "keeps its weights: leave it out.",
        )
        require(
            self.lora is None or self.trainable_layers is None,
            "`trainable_layers` and `lora` exclude each other; `lora.layers` restricts adapters to "
            "the last blocks.",
        )


@dataclass(frozen=True, kw_only=True)
class ReadingConfig:
    """What a reward model is shown of a prompt and an answer; the same in training and in use.

    It travels in the exported folder, and rules there unless a reward component says otherwise.

    Args:
        max_length: Most tokens; longer texts lose their beginning. None takes what the model reads.
        append_eos: End every text with the end token.
        plain_prompts: A prompt that is no chat is joined to its answer as ``text``, or both become
            two turns of a ``chat``; ``auto`` does so where the tokenizer has a chat template.
        include_prompt: False shows the answer alone.
        chat_template: For a tokenizer without one (an encoder's), or instead of its own:
            ``chatml``, the path of a Jinja file, or its text. It is saved with the model. Special
            tokens such as ``[CLS]`` and ``[SEP]`` are the template's to write.
    """

    max_length: int | None = None
    append_eos: bool = False
    plain_prompts: Literal["auto", "text", "chat"] = "auto"
    include_prompt: bool = True
    chat_template: str | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("max_length", self.max_length, 1)


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What a reward model learns from a pair, and from which pairs.

    The loss of a pair is -log σ(chosen - rejected - margin), plus the centring term.

    Args:
        use_margin: Whether the pairs' margins count; without, all are 0.
        centering_coef: Weight of (chosen + rejected)², which keeps scores around 0.
        label_smoothing: Share of labels taken to be the wrong way round, in [0, 0.5).
        negatives: Of several rejected answers to a prompt, ``each`` makes a pair of its own; or in
            every step only the one does that the model of the moment scores highest (``hardest``).
        hard_share: Share of a step's pairs that is learned from: those that the model of the moment
            gets least right. 1 takes all. With wrong labels in the data it learns those by heart.
    """

    use_margin: bool = True
    centering_coef: float = 0.01
    label_smoothing: float = 0.0
    negatives: Literal["each", "hardest"] = "each"
    hard_share: float = 1.0

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("centering_coef", self.centering_coef, 0)
        require(
            0 <= self.label_smoothing < 0.5,
            f"`label_smoothing` must lie in [0, 0.5), got {self.label_smoothing}.",
        )
        require(
            0 < self.hard_share <= 1, f"`hard_share` must lie in (0, 1], got {self.hard_share}."
        )
