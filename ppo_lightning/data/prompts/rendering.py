"""How a model reads a prompt: chat template and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.errors import DataError
from ppo_lightning.types import Message, PromptRecord

Chat = Literal["auto"] | bool


class Tokenizer(Protocol):
    """What is used of a ``transformers`` tokenizer."""

    chat_template: Any

    def __call__(self, text: Any, *, add_special_tokens: bool, **options: Any) -> Any:
        """Return ``{"input_ids": ...}`` of one text, or of a list of texts."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of token ids."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a chat rendered as text."""


def render(
    raw: RawPrompt, tokenizer: Tokenizer, *, chat: Chat = "auto", system_prompt: str | None = None
) -> PromptRecord:
    """Turn a prompt into the text that the model reads.

    Args:
        raw: A plain string or a chat.
        tokenizer: Its chat template renders chats, with the opening of the answer at the end.
        chat: Whether plain strings become one user turn of the chat template; ``auto`` does so
            where the tokenizer has a template. Chats are rendered always.
        system_prompt: First turn of chats that have no system turn.

    Raises:
        DataError: There is no chat template, the template refuses the chat, or a system prompt
            is given for a plain string; names the record.
    """
    turns = chat_turns(
        raw.prompt,
        raw.messages,
        tokenizer,
        chat=chat,
        system_prompt=system_prompt,
        origin=raw.origin,
    )
    if turns is None:
        text = raw.prompt or ""
        return PromptRecord(prompt=text, text=text, metadata=raw.metadata, origin=raw.origin)
    return PromptRecord(
        prompt=next(turn["content"] for turn in reversed(turns) if turn["role"] == "user"),
        text=rendered(turns, tokenizer, raw.origin, opening=True),
        messages=turns,
        metadata=raw.metadata,
        origin=raw.origin,
    )


def tokenize(record: PromptRecord, tokenizer: Tokenizer) -> list[int]:
    """Return a prompt's token ids, with exactly one BOS if the tokenizer sets one.

    What the tokenizer puts before every text (most often BOS) stands at the head once: chat
    templates that write it already get no second one, and those that do not get the first. What
    it puts *after* a text (EOS, with some settings) is left out: the response is still to come.
    """
    return tokenize_all([record], tokenizer)[0]


def tokenize_all(records: Sequence[PromptRecord], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of many prompts; see ``tokenize``."""
    if not records:
        return []
    texts = [record.text for record in records]
    head = special_head(tokenizer, max(texts, key=len))
    rows = _input_ids(tokenizer, texts, add_special_tokens=False)
    return [row if row[: len(head)] == head else head + row for row in rows]


def special_head(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return what the tokenizer puts before every text: BOS with most, nothing with some.

    Args:
        tokenizer: The policy's.
        text: Any text that it knows: some tokenizers refuse words that are not theirs.
    """
    bare, full = (
        _input_ids(tokenizer, [text], add_special_tokens=special)[0] for special in (False, True)
    )
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def _input_ids(
    tokenizer: Tokenizer, texts: list[str], *, add_special_tokens: bool
) -> list[list[int]]:
    # Not verbose: texts beyond the tokenizer's own limit are this module's to judge.
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)
    return [list(row) for row in encoded["input_ids"]]


def chat_turns(
    text: str | None,
    messages: tuple[Message, ...] | None,
    tokenizer: Tokenizer,
    *,
    chat: Chat,
    system_prompt: str | None,
    origin: str,
) -> tuple[Message, ...] | None:
    """Return the turns to render, or None for a string that stays plain.

    Args:
        text: A plain string, where there are no ``messages``.
        messages: Turns of a chat.
        tokenizer: See ``render``.
        chat: See ``render``.
        system_prompt: See ``render``.
        origin: Where it was read.

    Raises:
        DataError: There is no template for what is to be a chat, or no chat for a system prompt.
    """
    turns = messages
    if turns is None:
        if chat is False or (chat == "auto" and not tokenizer.chat_template):
            if system_prompt is not None:
                raise DataError(
                    "`system_prompt` needs a chat, and this is a plain string without a chat "
                    "template. Write it into the prompt, or set `chat: true`.",
                    path=origin or None,
                )
            return None
        if not tokenizer.chat_template:
            raise DataError(
                "`chat: true` makes a chat of this plain string, but the tokenizer has no chat "
                "template. Use a tokenizer with one, or set `chat: auto`.",
                path=origin or None,
            )
        turns = ({"role": "user", "content": text or ""},)
    if system_prompt is not None and not any(turn["role"] == "system" for turn in turns):
        turns = ({"role": "system", "content": system_prompt}, *turns)
    return turns


def rendered(
    turns: Sequence[Message],
    tokenizer: Tokenizer,
    origin: str,
    *,
    opening: bool,
    without: str = "Use a tokenizer with one, or give plain strings with `chat: false`.",
) -> str:
    """Render turns as text.

    Args:
        turns: Of a chat.
        tokenizer: With a chat template.
        origin: Where they were read.
        opening: Whether the opening of an answer stands at the end.
        without: What to do where there is no template.

    Raises:
        DataError: There is no template, or it refuses the chat; names the record.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"is a chat, but the tokenizer has no chat template. {without}", path=origin or None
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=opening
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise DataError(
            f"the chat template refuses the chat: {error}", path=origin or None
        ) from error
    return str(text)
