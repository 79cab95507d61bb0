"""Prompts: where they come from, how a model reads them, and the one place that pads."""

from ppo_lightning.data.collate import left_pad, make_prompt_batch
from ppo_lightning.data.prompts import Overlong, PromptSet, shuffled_order
from ppo_lightning.data.rendering import Chat, Tokenizer, render, tokenize
from ppo_lightning.data.sources import (
    JsonlPrompts,
    PromptList,
    PromptSource,
    RawPrompt,
    TextPrompts,
    as_source,
)

__all__ = [
    "Chat",
    "JsonlPrompts",
    "Overlong",
    "PromptList",
    "PromptSet",
    "PromptSource",
    "RawPrompt",
    "TextPrompts",
    "Tokenizer",
    "as_source",
    "left_pad",
    "make_prompt_batch",
    "render",
    "shuffled_order",
    "tokenize",
]
