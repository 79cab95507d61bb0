"""How a reward model's tokenizer is left, so that transformers' own classes score as here.

Here scores are read by the mask. transformers' own classifiers read them at the last token that is
not the pad token, one place early where a text ends with that very token: with an end token that
serves as pad token. And its tokenizers cut the end of a long text, unless a file says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def use_distinct_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Give model and tokenizer a pad token that is not the end token, while they are saved.

    It is another special token of the tokenizer's; nothing is added. Where there is none, the
    model's config names no pad token: transformers then scores texts one by one, and says so.

    Args:
        model: Its config is put back in the end.
        tokenizer: Keeps what it is given here.
    """
    before = model.config.pad_token_id
    model.config.pad_token_id = distinct_pad(tokenizer)
    try:
        yield
    finally:
        model.config.pad_token_id = before


def distinct_pad(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return a pad token that no text ends with, and let the tokenizer pad with it.

    Args:
        tokenizer: Changed in place.

    Returns:
        Its id, or None where every special token may end a text.
    """
    if tokenizer.pad_token is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return int(tokenizer.pad_token_id)
    ends = {tokenizer.eos_token, getattr(tokenizer, "sep_token", None)}
    first = [tokenizer.unk_token, *tokenizer.all_special_tokens]
    free = [token for token in first if token is not None and token not in ends]
    if not free:
        return None
    tokenizer.pad_token = free[0]
    return int(tokenizer.pad_token_id)


def cut_at_front(tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> None:
    """Let a tokenizer take the beginning off long texts, and say so in the files that it saves.

    Args:
        tokenizer: Changed in place.
        max_length: Most tokens of a text; None leaves its own limit.
    """
    tokenizer.truncation_side = "left"
    tokenizer.init_kwargs["truncation_side"] = "left"  # what is not named there is not saved
    if max_length is not None:
        tokenizer.model_max_length = max_length
