"""When two prompts are the same one."""

from __future__ import annotations

import json
import unicodedata
from hashlib import blake2b
from typing import Literal

from ppo_lightning.data.prompts.raw import RawPrompt

__all__ = ["Likeness", "normalized", "prompt_key"]

Likeness = Literal["exact", "normalized"]


def prompt_key(raw: RawPrompt, *, likeness: Likeness = "exact", salt: str = "") -> int:
    """Return a number that equal prompts share, whatever their metadata.

    A plain string and a chat that is one user turn with that text count as equal.

    Args:
        raw: The prompt.
        likeness: ``exact`` compares the texts, ``normalized`` leaves case, white space and forms
            of one character (full-width letters) out.
        salt: Another one gives other numbers.

    Returns:
        64 bits, the same on every machine.
    """
    text = _text(raw)
    if likeness == "normalized":
        text = normalized(text)
    data = f"{salt}\0{text}".encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def normalized(text: str) -> str:
    """Return the text without differences of case, white space and forms of a character."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _text(raw: RawPrompt) -> str:
    turns = raw.messages
    if turns is None:
        return raw.prompt or ""
    if len(turns) == 1:
        return turns[0]["content"]
    return json.dumps([[turn["role"], turn["content"]] for turn in turns], ensure_ascii=False)
