"""Tiny reward models: pairs with a rule in them, an encoder, a module and its data."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from ppo_lightning.configs import (
    BackboneConfig,
    GroupConfig,
    LoraConfig,
    PreferenceConfig,
    ReadingConfig,
)
from ppo_lightning.data import PreferenceDataModule
from ppo_lightning.modules import RewardModule
from tests.helpers.runs import trainer as tiny_trainer
from tests.helpers.tiny_models import PUNCTUATION, WIDE, WORDS, build_gpt2, build_llama

FILLER = ["the", "cat", "dog", "bird", "sat", "ran", "saw", "house", "tree", "was", "red", "blue"]
FAMILIES = ("gpt2", "llama", "bert")


def build_bert(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save an encoder without any head, as sentence encoders come: dropout, absolute positions."""
    tokenizer = encoder_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "initializer_range": WIDE,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertModel(BertConfig(**(settings | overrides)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, between [CLS] and [SEP]; no chat template, no end token."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {symbol: i for i, symbol in enumerate([*specials, *WORDS, *PUNCTUATION])}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def build_backbone(family: str, folder: Path, **overrides: Any) -> Path:
    """Save one of the families."""
    builders = {"gpt2": build_gpt2, "llama": build_llama, "bert": build_bert}
    return builders[family](folder, **overrides)


def rule_pairs(count: int, *, seed: int = 0, num_prompts: int = 20) -> list[dict[str, Any]]:
    """Pairs of which the chosen answer says "good" and the rejected one "bad", somewhere."""
    rng = random.Random(seed)

    def answer(word: str) -> str:
        words = [rng.choice(FILLER) for _ in range(rng.randint(2, 6))]
        words.insert(rng.randint(0, len(words)), word)
        return " " + " ".join(words)

    prompts = ["the " + " ".join(rng.choices(FILLER, k=3)) for _ in range(num_prompts)]
    return [
        {"prompt": prompts[i % num_prompts], "chosen": answer("good"), "rejected": answer("bad")}
        for i in range(count)
    ]


def reward_module(folder: Path, **overrides: Any) -> RewardModule:
    """A module that learns quickly.

    Args:
        folder: Of the backbone.
        overrides: Arguments of ``RewardModule``, or of ``PreferenceConfig``; dictionaries for
            ``backbone``, ``reading`` and ``lora`` change single settings.
    """
    backbone = {"path": str(folder)} | overrides.pop("backbone", {})
    if lora := overrides.pop("lora", None):
        backbone["lora"] = LoraConfig(**lora)
    names = [field.name for field in fields(PreferenceConfig)]
    preference = {name: overrides.pop(name) for name in names if name in overrides}
    return RewardModule(
        BackboneConfig(**backbone),
        group=overrides.pop("group", GroupConfig(lr=3e-3)),
        reading=ReadingConfig(**overrides.pop("reading", {})),
        preference=PreferenceConfig(**preference),
        **overrides,
    )


def pair_data(pairs: list[dict[str, Any]] | None = None, **overrides: Any) -> PreferenceDataModule:
    """Steps of eight pairs."""
    settings: dict[str, Any] = {"batch_size": 8, "seed": 3, "val_share": 0.25} | overrides
    if "val_pairs" in settings:
        settings.pop("val_share")
    return PreferenceDataModule(rule_pairs(40) if pairs is None else pairs, **settings)


def trainer(folder: Path, **options) -> pl.Trainer:
    """Two epochs unless told otherwise."""
    return tiny_trainer(folder, **({"max_epochs": 2} | options))


def fit(folder: Path, module, data, *, ckpt=None, **options) -> pl.Trainer:
    """Fit from the same random numbers every time."""
    pl.seed_everything(0, verbose=False)
    used = trainer(folder, **options)
    used.fit(module, data, ckpt_path=ckpt)
    return used
