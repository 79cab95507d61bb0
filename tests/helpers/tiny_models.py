"""Random models of a few thousand weights, saved as Hugging Face folders with a tokenizer.

Nothing is downloaded. Two families, since each shows faults that the other hides: GPT-2 has learned
absolute positions (which left padding without position ids shifts) and tied embeddings; Llama has
rotary positions, grouped heads, and its own BOS. Their tokenizers differ in kind as well.

Every builder is a plain function, usable in a process of its own, takes config overrides
(``build_gpt2(folder, n_positions=64)``), and gives the same weights for the same seed.
"""

from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# Weights this wide make a position or a token that is off by one show up in every number; with the
# families' usual 0.02 a tiny model's outputs hardly depend on its inputs.
WIDE = 0.3

VOCABULARY = (
    "the a cat dog bird sat ran saw on under house tree is was good bad big small "
    "happy sad red blue and or not yes no what who why how hello world you i we do like "
    "it movie film great awful user assistant system"
)
WORDS = VOCABULARY.split()
PUNCTUATION = list(".,!?:'-+=")

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
BRACKETS = (
    "{% for message in messages %}"
    "{{ '[q]' if message['role'] == 'user' else '[a]' }}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: byte-level pairs, EOS serving as BOS, and here a pad token of its own.

    It knows "hello" and " the" as one token each besides their letters, so that text decoded and
    tokenised again need not give the ids that were sampled. No chat template.
    """
    space = "Ġ"  # how the byte level writes a leading space
    merges = ["h e", "l l", "he ll", "hell o", "t he", f"{space} the", f"{space} a", "a t", "c at"]
    merges += ["d o", "do g", "i n", "i s", "g o", "go o", "goo d", "b a", "ba d"]
    specials = ["<|endoftext|>", "<|pad|>", "<unk>"]
    letters = [*ascii_lowercase, *digits, *PUNCTUATION, space]
    symbols = [*specials, *letters, *(merge.replace(" ", "") for merge in merges)]
    tokenizer = Tokenizer(
        BPE(
            vocab={symbol: i for i, symbol in enumerate(symbols)},
            merges=[tuple(merge.split(" ")) for merge in merges],
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        unk_token="<unk>",
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, a BOS set before every plain text, and a ChatML-like template.

    The template writes the BOS too, as real ones do: tokenising its output as plain text would
    give two. A turn ends with ``<|im_end|>``, which is the EOS.
    """
    specials = ["<pad>", "<s>", "<|im_end|>", "<unk>", "<|im_start|>"]
    symbols = [*specials, *WORDS, *PUNCTUATION, *digits]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(behavior="isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, its own template, no BOS: a reward model's, unlike the policies'."""
    specials = ["[pad]", "[end]", "[unk]", "[q]", "[a]"]
    symbols = [*specials, *ascii_lowercase, *digits, *PUNCTUATION, " "]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="[unk]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="[end]",
        pad_token="[pad]",
        unk_token="[unk]",
        additional_special_tokens=["[q]", "[a]"],
        chat_template=BRACKETS,
    )


def build_gpt2(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a GPT-2 policy: 128 absolute positions, tied embeddings, no dropout."""
    tokenizer = byte_pair_tokenizer()
    settings = {
        "n_positions": 128,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": WIDE,
        **_token_settings(tokenizer),
    }
    config = GPT2Config(**{**settings, **overrides})
    return _save(folder, tokenizer, lambda: GPT2LMHeadModel(config), seed)


def build_llama(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a Llama policy: rotary positions, two heads sharing one key, untied embeddings."""
    tokenizer = word_tokenizer()
    config = LlamaConfig(**{**_llama_settings(tokenizer), **overrides})
    return _save(folder, tokenizer, lambda: LlamaForCausalLM(config), seed)


def build_reward_model(folder: Path, *, seed: int = 1, **overrides: Any) -> Path:
    """Save a reward model: a Llama trunk with one score, and a tokenizer that is no policy's."""
    tokenizer = character_tokenizer()
    settings = {**_llama_settings(tokenizer), "num_labels": 1, "max_position_embeddings": 256}
    config = LlamaConfig(**{**settings, **overrides})
    return _save(folder, tokenizer, lambda: LlamaForSequenceClassification(config), seed)


def _llama_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "max_position_embeddings": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": WIDE,
        **_token_settings(tokenizer),
    }


def _token_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    make_model: Callable[[], PreTrainedModel],
    seed: int,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
