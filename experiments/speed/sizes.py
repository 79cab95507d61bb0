"""Models, prompts and lengths of the speed experiments: the same work for whoever is measured.

Llama-like models of three sizes with random weights. Their output layer has a bias, which sets the
length mode, so that nobody needs a logits processor:

* ``fixed``: the end token is barred, every response has ``response_len`` tokens;
* ``variable``: the end token comes at random with a constant hazard, 40 % of that on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
HAZARD = 0.035
"""Of the end token, so that min(Geometric, 64) is 25.6 on average."""

Mode = Literal["fixed", "variable"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the work.

    Args:
        vocab: Tokens that there are.
        hidden: Width of the states.
        layers: Blocks.
        heads: Of attention.
        inter: Width inside a block.
        rollout: Responses of an iteration.
        minibatches: Optimiser steps of a pass over them.
        prompt_len: Tokens of each prompt.
        response_len: Most tokens of a response.
        epochs: Passes over a rollout.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    inter: int
    rollout: int
    minibatches: int = 4
    prompt_len: int = 32
    response_len: int = 64
    epochs: int = 4


SIZES = {
    "S": Size(vocab=512, hidden=128, layers=4, heads=4, inter=384, rollout=64),
    "M": Size(vocab=4096, hidden=384, layers=6, heads=6, inter=1024, rollout=32),
    "L": Size(vocab=8192, hidden=640, layers=10, heads=10, inter=1728, rollout=32),
}
"""1, 14 and 60 million parameters."""


class SpeedConfig(LlamaConfig):  # type: ignore[misc]
    """Of a Llama whose output layer has a bias."""

    model_type = "speed_llama"


class SpeedLlama(LlamaForCausalLM):
    """A Llama whose output layer has a bias, in which the length mode lives."""

    config_class = SpeedConfig

    def __init__(self, config: SpeedConfig) -> None:
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()


AutoConfig.register("speed_llama", SpeedConfig)
AutoModelForCausalLM.register(SpeedConfig, SpeedLlama)


def write_models(size: Size, mode: Mode, folder: Path) -> None:
    """Write the folders ``policy``, ``critic`` and ``reward``, each with the tokenizer."""
    tokenizer = word_tokenizer(size)
    torch.manual_seed(0)
    policy = SpeedLlama(SpeedConfig(**_shape(size)))
    _set_mode(policy, size, mode)
    made: dict[str, nn.Module] = {"policy": policy}
    for seed, name in enumerate(("critic", "reward"), 1):
        torch.manual_seed(seed)
        made[name] = LlamaForSequenceClassification(LlamaConfig(**_shape(size), num_labels=1))
    for name, model in made.items():
        model.save_pretrained(folder / name)  # type: ignore[operator]
        tokenizer.save_pretrained(folder / name)


def _shape(size: Size) -> dict[str, object]:
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inter,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "max_position_embeddings": max(1024, size.prompt_len + size.response_len),
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


@torch.no_grad()
def _set_mode(model: SpeedLlama, size: Size, mode: Mode) -> None:
    """Bar padding, and the end token or give it its hazard."""
    head = model.lm_head
    head.bias.zero_()
    head.bias[PAD] = -30.0
    if mode == "fixed":
        head.bias[EOS] = -30.0
        return
    # Logits of a random model are normal with this variance, and a state's norm is sqrt(hidden).
    variance = model.config.initializer_range**2 * size.hidden
    head.weight[EOS].zero_()
    head.bias[EOS] = math.log(HAZARD / (1 - HAZARD)) + math.log(size.vocab - 2) + variance / 2


def word_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """One word for each id."""
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {f"w{i}": i for i in range(3, size.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def prompts(size: Size, count: int, *, seed: int = 1) -> list[str]:
    """Write prompts of ``prompt_len`` random words each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, size.vocab, (count, size.prompt_len), generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
