"""What ends a response: end tokens, and stop strings that are tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from ppo_lightning.errors import ConfigError
from ppo_lightning.models.adapters import base_causal_lm
from ppo_lightning.models.checks import embedding_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> tuple[int, ...]:
    """Collect every id that ends a response, in the tokenizer and in the model's two configs.

    Args:
        tokenizer: Its own end token comes first.
        model: Causal language model, with or without an adapter. Ids that it has no embedding for
            are left out: it cannot emit them.
    """
    base: Any = base_causal_lm(model)
    rows = embedding_rows(base)
    found = listed_end_ids(tokenizer, getattr(base, "generation_config", None), base.config)
    return tuple(i for i in found if i < rows)


def listed_end_ids(
    tokenizer: PreTrainedTokenizerBase, generation: Any, config: Any
) -> tuple[int, ...]:
    """Collect the end tokens of a tokenizer and of a model's two configs.

    Args:
        tokenizer: Its own comes first.
        generation: Generation settings, or None.
        config: Of the model.
    """
    named = [
        tokenizer.eos_token_id,
        getattr(generation, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
    ]
    listed = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named]
    return tuple(dict.fromkeys(i for ids in listed for i in ids if i is not None))


def special_stop_ids(tokenizer: PreTrainedTokenizerBase, strings: Iterable[str]) -> tuple[int, ...]:
    """Find the ids of stop strings that are special tokens.

    Responses are decoded without special tokens, so their text would never be found.

    Args:
        tokenizer: Knows the special tokens.
        strings: Stop strings.

    Raises:
        ConfigError: A string holds a special token beside other text.
    """
    special = {t.content: id_ for id_, t in tokenizer.added_tokens_decoder.items() if t.special}
    for string in strings:
        inside = [token for token in special if token in string and token != string]
        if inside and string not in special:
            raise ConfigError(
                f"`sampling.stop_strings`: {string!r} holds the special token {inside[0]!r}, which "
                "is not part of a response's text, so it would never be found. Give the token "
                "alone, or text without it."
            )
    return tuple(special[string] for string in strings if string in special)
