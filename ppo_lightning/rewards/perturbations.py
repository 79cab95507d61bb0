"""Good answers made bad in ways that a reward should see: shuffled, cut, padded, off topic.

All are pure functions of the texts and a seed. Where a language has no spaces, such as Chinese or
Thai, a character counts as a word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["PERTURBATIONS", "Answered", "perturbed", "words"]

# Scripts written without spaces, their punctuation, and full-width signs.
_SPACELESS = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f\u1780-\u17ff"  # Burmese, Khmer
    "\u3001-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana, Han
    "\uff00-\uffef\U00020000-\U0003ffff"
)
# Marks that stand on, or belong to, the character before them.
_MARKS = (
    "\u0e31\u0e33-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb3-\u0ebc\u0ec8-\u0ecd"
    "\u102b-\u103e\u17b6-\u17d3\u3099\u309a\ufe00-\ufe0f"
)
_WORD = re.compile(rf"[{_SPACELESS}][{_MARKS}]*|[^\s{_SPACELESS}]+")
_SENTENCE = re.compile(r"[^.!?。！？…\n]+[.!?。！？…\n]*\s*")
_TRIES = 8  # to shuffle a text into another one


@dataclass(frozen=True)
class Answered:
    """A prompt and an answer to it.

    Args:
        prompt: What is asked; of a chat the last turn of the user.
        response: The answer.
        about: Tells prompts apart: for a chat all its turns, else the prompt.
    """

    prompt: str
    response: str
    about: str


def words(text: str) -> list[str]:
    """Split a text into words; in scripts without spaces, into characters with their marks."""
    return _WORD.findall(text)


def perturbed(kind: str, items: Sequence[Answered], *, seed: int) -> list[str | None]:
    """Make every answer bad in one way.

    Args:
        kind: One of ``PERTURBATIONS``.
        items: Good answers.
        seed: The same one gives the same texts.

    Returns:
        One text for each; None where it cannot be done: a text of one word cannot be shuffled or
        cut, and what would come out as it went in is none either.

    Raises:
        KeyError: Another ``kind``.
    """
    made = PERTURBATIONS[kind](items, seed)
    return [
        None if bad is None or bad.strip() == item.response.strip() else bad
        for item, bad in zip(items, made, strict=True)
    ]


def _shuffled(items: Sequence[Answered], seed: int) -> list[str | None]:
    """Words in another order; what stands between them stays where it was."""
    chances = (random.Random(f"{seed}:shuffled:{i}") for i in range(len(items)))
    return [_shuffle(item.response, chance) for item, chance in zip(items, chances, strict=True)]


def _shuffle(text: str, chance: random.Random) -> str | None:
    found = words(text)
    if len({*found}) < 2:
        return None
    order = list(found)
    for _ in range(_TRIES):
        chance.shuffle(order)
        if order != found:
            break
    else:
        order = [*found[1:], found[0]]
    between = _WORD.split(text)
    parts = [between[0]]
    for word, gap in zip(order, between[1:], strict=True):
        parts += [" " if _would_stick(parts[-1], word) else "", word, gap]
    return "".join(parts)


def _would_stick(before: str, word: str) -> bool:
    """Whether two words of a script with spaces would become one."""
    return bool(before) and not before[-1].isspace() and not _is_spaceless(before[-1] + word[0])


def _is_spaceless(characters: str) -> bool:
    return re.search(f"[{_SPACELESS}]", characters) is not None


def _truncated(items: Sequence[Answered], seed: int) -> list[str | None]:
    """The first half."""
    return [_half(item.response) for item in items]


def _half(text: str) -> str | None:
    places = [match.end() for match in _WORD.finditer(text)]
    return text[: places[len(places) // 2 - 1]] if len(places) > 1 else None


def _repeated(items: Sequence[Answered], seed: int) -> list[str | None]:
    """The last sentence again and again, to more than twice the length."""
    return [_pad(item.response) for item in items]


def _pad(text: str) -> str | None:
    sentences = [part for part in _SENTENCE.findall(text) if words(part)]
    if not sentences:
        return None
    last: str = sentences[-1].strip()
    gap = "" if _is_spaceless(last[-1]) else " "
    times = len(words(text)) // len(words(last)) + 1
    return text.rstrip() + (gap + last) * times


def _off_topic(items: Sequence[Answered], seed: int) -> list[str | None]:
    """The answer to another prompt; each answer is used once at most."""
    chance = random.Random(f"{seed}:off-topic")
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.about, []).append(number)
    topics = list(groups.values())
    chance.shuffle(topics)
    order = [number for topic in topics for number in topic]
    # Moved on by the largest topic, no answer meets its own one, unless that is more than half.
    step = max((len(topic) for topic in topics), default=0)
    made: list[str | None] = [None] * len(items)
    for place, number in enumerate(order):
        other = items[order[(place + step) % len(order)]]
        if other.about != items[number].about:
            made[number] = other.response
    return made


def _empty(items: Sequence[Answered], seed: int) -> list[str | None]:
    """Nothing at all."""
    return [""] * len(items)


def _echo(items: Sequence[Answered], seed: int) -> list[str | None]:
    """The prompt itself."""
    return [item.prompt or None for item in items]


PERTURBATIONS: dict[str, Callable[[Sequence[Answered], int], list[str | None]]] = {
    "shuffled": _shuffled,
    "truncated": _truncated,
    "repeated": _repeated,
    "off-topic": _off_topic,
    "empty": _empty,
    "echo": _echo,
}
"""Ways to make a good answer bad, by name."""
