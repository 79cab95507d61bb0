"""A causal language model that says what a test wrote down for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.types import PromptBatch, PromptRecord


class ScriptedLM(nn.Module):
    """Makes the next token of each row certain, from a script of ids.

    Args:
        scripts: Ids that each row says, in order; the last one is repeated.
        vocab_size: Width of the logits.
    """

    def __init__(self, scripts: Sequence[Sequence[int]], vocab_size: int = 16) -> None:
        super().__init__()
        self.scripts = scripts
        self.vocab_size = vocab_size
        self.calls = 0

    def forward(self, input_ids: Tensor, cache: Any = None, **_: Any) -> Any:
        self.calls = 0 if cache is None else self.calls + 1
        logits = torch.zeros(len(input_ids), 1, self.vocab_size)
        for row, script in enumerate(self.scripts):
            logits[row, 0, script[min(self.calls, len(script) - 1)]] = 60.0
        return SimpleNamespace(logits=logits, cache=object())


class Letters:
    """Decodes id 0 to "a", 1 to "b" …; a tokenizer as far as engines are concerned."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + i) for i in token_ids)


def prompt_batch(
    prompts: Sequence[Sequence[int]], *, pad_id: int = 0, seed: int = 0
) -> PromptBatch:
    """Left-pad prompts by hand."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    numbers = torch.arange(len(prompts))
    return PromptBatch(
        prompt_ids=ids,
        prompt_mask=mask,
        keys=numbers + 1000 * seed,
        indices=numbers,
        groups=numbers,
        records=tuple(PromptRecord(prompt=str(p), text=str(p)) for p in prompts),
    )
