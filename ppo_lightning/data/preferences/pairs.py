"""Pairs of answers to one prompt, one better than the other: what a reward model learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ppo_lightning.data.prompts.chats import read_turns, text_problem
from ppo_lightning.data.prompts.identity import prompt_key
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.records.base import Record, RecordSource, read_examples
from ppo_lightning.data.records.plain import is_null
from ppo_lightning.errors import DataError
from ppo_lightning.types import Completions, Message

__all__ = ["Identical", "PreferencePair", "answer_completions", "preference_pair", "read_pairs"]

Identical = Literal["error", "drop"]
Turns = tuple[Message, ...]

_PROMPTS = ("prompt", "messages", "conversations")


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Answers to one prompt: a chosen one, and one or more rejected.

    Args:
        prompt: A plain string, or the turns of a chat up to the answers.
        chosen: Turns of the better answer, most often one of the assistant's; the last one is.
        rejected: The worse answers, at least one.
        margin: By how much the better one should win, in units of score.
        origin: Where it was read (``pairs.jsonl:17``), for messages about it.
    """

    prompt: str | Turns
    chosen: Turns
    rejected: tuple[Turns, ...]
    margin: float = 0.0
    origin: str = ""

    @property
    def prompt_key(self) -> int:
        """64 bits that pairs of one prompt share, and prompts of the other data modules as well.

        Case and white space make no difference, nor does what follows the user's last turn.
        """
        if isinstance(self.prompt, str):
            return prompt_key(RawPrompt(prompt=self.prompt), likeness="normalized")
        turns = self.prompt
        last = max(number for number, turn in enumerate(turns) if turn["role"] == "user")
        return prompt_key(RawPrompt(messages=turns[: last + 1]), likeness="normalized")


def read_pairs(source: RecordSource, *, identical: Identical = "error") -> list[PreferencePair]:
    """Read all pairs of a source; all records that are none come in one report.

    Args:
        source: Of ``as_records``.
        identical: A pair whose two answers are the same says nothing: an ``error``, or left out
            (``drop``).

    Raises:
        DataError: Records are no pairs, by file and line; or no pair is left.
    """
    if identical not in ("error", "drop"):
        raise ValueError(f"`identical` must be one of error, drop, got {identical!r}.")
    found = read_examples(source, lambda record: preference_pair(record, identical=identical))
    pairs = [pair for pair in found if pair.rejected]
    if not pairs:
        raise DataError(
            "holds no pair that differs: in all of them the chosen and the rejected answer are "
            "the same.",
            path=source.name,
        )
    return pairs


def preference_pair(record: Record, *, identical: Identical = "error") -> PreferencePair:
    """Make a pair of a record.

    Three forms are read: ``prompt`` with ``chosen`` and ``rejected`` (texts); ``messages`` (the
    turns before the answer) with ``chosen`` and ``rejected`` (texts, turns or one turn); or
    ``chosen`` and ``rejected`` alone, as whole chats whose common beginning is the prompt.
    ``rejected`` may be a list of several answers, ``margin`` a number from 0.

    Args:
        record: As it was read.
        identical: ``drop`` leaves rejected answers out that repeat the chosen one, and so maybe
            returns a pair without any.

    Raises:
        DataError: It is no pair; names the place and what is wrong.
    """
    chosen = _answer(record, "chosen", record.required("chosen"))
    rejected = [_answer(record, "rejected", a) for a in _several(record.required("rejected"))]
    if not rejected:
        raise record.error("`rejected` is an empty list; give at least one answer.")
    prompt = _prompt(record, chosen)
    if prompt is None or _repeats(prompt, chosen):
        prompt, chosen, rejected = _split_chats(record, chosen, rejected)
    for name, answer in (("chosen", chosen), *(("rejected", answer) for answer in rejected)):
        _check_answer(record, name, answer)
    different = [answer for answer in rejected if answer != chosen]
    if identical == "error" and len(different) < len(rejected):
        raise record.error(
            "`chosen` and `rejected` are the same answer, from which nothing can be learned. Mend "
            "the record, or set `identical: drop` to leave such pairs out."
        )
    return PreferencePair(
        prompt=prompt,
        chosen=chosen,
        rejected=tuple(different),
        margin=_margin(record),
        origin=record.origin,
    )


def _prompt(record: Record, chosen: Turns) -> str | Turns | None:
    """Return what `prompt` or `messages` holds; None where the answers are whole chats."""
    names = [name for name in _PROMPTS if not is_null(record.values.get(name))]
    if len(names) > 1:
        raise record.error(
            f"has both `{names[0]}` and `{names[1]}`. Leave one of them out, such as with "
            f"`fields: {{{names[0]}: null}}`."
        )
    if not names:
        if not any(turn["role"] == "user" for turn in chosen):
            raise record.error(record.missing(list(_PROMPTS[:2])))
        return None
    value = record.values[names[0]]
    if isinstance(value, str) and names[0] == "prompt":
        return _readable(record, "prompt", value)
    turns = read_turns(value, names[0], origin=record.origin, may_be_text=names[0] == "prompt")
    if not any(turn["role"] == "user" for turn in turns):
        raise record.error(f"`{names[0]}` has no turn of role `user`.")
    if turns[-1]["role"] == "assistant":
        raise record.error(
            f"`{names[0]}` ends with a turn of role `assistant`. The answers belong under `chosen` "
            "and `rejected`, the turns before them here."
        )
    return turns


def _repeats(prompt: str | Turns, answer: Turns) -> bool:
    """Whether an answer begins with the prompt that it answers, as some data sets have it."""
    if isinstance(prompt, str):
        asked = [turn["content"] for turn in answer if turn["role"] == "user"]
        return asked[:1] == [prompt]
    return answer[: len(prompt)] == prompt


def _split_chats(
    record: Record, chosen: Turns, rejected: Sequence[Turns]
) -> tuple[Turns, Turns, list[Turns]]:
    """Find the turns that whole chats have in common: the prompt."""
    others = [_common(chosen, chat) for chat in rejected if chat != chosen]
    length = min(others, default=len(chosen) - 1)
    prompt, answers = chosen[:length], [chat[length:] for chat in (chosen, *rejected)]
    if not any(turn["role"] == "user" for turn in prompt):
        raise record.error(
            f"`chosen` and `rejected` differ from turn {length + 1} on{_beginnings(answers)}, "
            "before any question of a user: they do not answer one prompt. Give chats that begin "
            "alike, or the common turns under `messages`."
        )
    for name, answer in zip(("chosen", *["rejected"] * len(rejected)), answers, strict=True):
        if not answer:
            raise record.error(
                f"`{name}` ends after turn {length}, where the other chat goes on: it holds no "
                "answer."
            )
        if answer[0]["role"] == "user":
            raise record.error(
                f"turn {length + 1} of `{name}` is the user's, and the other chat has another one "
                f"there{_beginnings(answers)}: the two do not answer one prompt."
            )
    return prompt, answers[0], answers[1:]


def _common(left: Turns, right: Turns) -> int:
    """Count the turns at the beginning that two chats share."""
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)


def _beginnings(answers: Sequence[Turns]) -> str:
    """Quote the first turns in which chats differ."""
    quoted = [repr(answer[0]["content"][:40]) for answer in answers if answer]
    return f" ({' and '.join(quoted[:2])})" if quoted else ""


def _answer(record: Record, name: str, value: Any) -> Turns:
    """Return an answer as turns: a text, a turn, or a list of turns."""
    if isinstance(value, str) and not value.lstrip().startswith("[{"):
        text = _readable(record, name, value)
        return ({"role": "assistant", "content": text},)
    turns = [value] if isinstance(value, Mapping) else value
    try:
        found = read_turns(turns, name, origin=record.origin, may_be_text=True)
    except DataError:
        if not isinstance(value, str):
            raise
        return ({"role": "assistant", "content": _readable(record, name, value)},)
    if not found:
        raise record.error(f"`{name}` is an empty list; give the turns of an answer.")
    return found


def _check_answer(record: Record, name: str, answer: Turns) -> None:
    if answer[0]["role"] == "user":
        raise record.error(
            f"`{name}` begins with a turn of role `user` that is not the prompt's. Give the turns "
            "of the answer alone, or whole chats that begin with the prompt."
        )
    if answer[-1]["role"] != "assistant":
        raise record.error(
            f"`{name}` ends with a turn of role `{answer[-1]['role']}`; an answer ends with one of "
            "role `assistant`."
        )
    if not answer[-1]["content"].strip():
        raise record.error(f"`{name}` is empty.")


def _several(value: Any) -> list[Any]:
    """Return the rejected answers: one, or a list of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value]
    is_chat = bool(value) and all(isinstance(turn, Mapping) for turn in value)
    return [value] if is_chat else list(value)


def _readable(record: Record, name: str, text: str) -> str:
    if (problem := text_problem(text)) is not None:
        raise record.error(f"`{name}` {problem}")
    return text


def _margin(record: Record) -> float:
    value = record.values.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, str):
        with suppress(ValueError):  # tables of text have their numbers as such
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise record.error(f"`margin` must be a number, got {value!r:.40}.")
    if not (math.isfinite(value) and value >= 0):
        raise record.error(
            f"`margin` must be a finite number from 0, got {value}. If the rejected answer is the "
            "better one, exchange the two."
        )
    return float(value)


def answer_completions(prompt: str | Turns, answers: Sequence[Turns]) -> Completions:
    """Show answers to a reward component, as a policy's own responses would be.

    So a reward model reads in training what it will read when it scores.

    Args:
        prompt: A plain string or the turns of a chat.
        answers: To that prompt. A plain prompt has answers of one turn; of longer ones, what comes
            before the last turn joins the prompt.
    """
    chats: list[Turns | None] = []
    for answer in answers:
        if isinstance(prompt, str) and len(answer) == 1:
            chats.append(None)
        else:
            before: Turns = (
                ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
            )
            chats.append((*before, *answer[:-1]))
    asked = [prompt if isinstance(prompt, str) else _last_question(prompt)] * len(answers)
    return Completions(
        prompts=asked,
        messages=chats,
        responses=[answer[-1]["content"] for answer in answers],
        prompt_ids=[()] * len(answers),
        response_ids=[()] * len(answers),
        truncated=[False] * len(answers),
        metadata=[{}] * len(answers),
    )


def _last_question(turns: Turns) -> str:
    return next(turn["content"] for turn in reversed(turns) if turn["role"] == "user")
