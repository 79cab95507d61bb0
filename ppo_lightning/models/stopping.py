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
    named = [
        tokenizer.eos_token_id,
        getattr(getattr(base, "generation_config", None), "eos_token_id", None),
        getattr(base.config, "eos_token_id", None),
    ]
    listed = [ids if isinstance(ids, (list, tuple)) else [ids] for ids in named]
    rows = embedding_rows(base)
    unique = dict.fromkeys(i for ids in listed for i in ids if i is not None and i < rows)
    return tuple(unique)


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
