"""From demonstrations to token ids, and which of them are learned.

What the policy is asked in PPO is what it reads here: the ids before an answer are those of
``tokenize`` for that prompt, and the answer's ids continue them. The learned tokens are found by
rendering, never by looking for ids in a text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ppo_lightning.data.demonstrations.demonstration import Demonstration
from ppo_lightning.data.prompts.rendering import (
    Chat,
    Tokenizer,
    chat_turns,
    rendered,
    special_head,
)
from ppo_lightning.errors import DataError
from ppo_lightning.types import Message, PromptRecord

__all__ = ["Example", "Learner"]

Span = tuple[int, int]
Turns = Sequence[Message]

DEMONSTRATED = "demonstrated"
"""Metadata key of the answer that the prompt of a demonstration has there."""

_WITHOUT = "Set `model.init_args.chat_template` to `chatml` or a file, or give plain strings."
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Example:
    """Token ids with the stretches that are learned.

    Args:
        ids: Token ids, without padding.
        spans: Half-open stretches of learned tokens, ascending; never the first token, which
            nothing foretells.
        origin: Where it was read.
    """

    ids: array[int]
    spans: tuple[Span, ...]
    origin: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_learned(self) -> int:
        """Number of learned tokens."""
        return sum(stop - start for start, stop in self.spans)

    def cut(self, length: int) -> Example:
        """Return the first ``length`` tokens."""
        spans = tuple((start, min(stop, length)) for start, stop in self.spans if start < length)
        return Example(ids=self.ids[:length], spans=spans, origin=self.origin)


class Learner:
    """Makes examples of demonstrations, as one tokenizer reads them.

    Args:
        tokenizer: The policy's.
        end_ids: Every id that ends a response in a rollout.
        chat: Whether a plain prompt becomes a user turn of the chat template; ``auto`` does so
            where the tokenizer has a template.
        system_prompt: First turn of chats that have none of role system.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Sequence[int],
        chat: Chat = "auto",
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_ids = frozenset(end_ids)
        self.chat = chat
        self.system_prompt = system_prompt
        self._head: list[int] | None = None

    def examples(self, demonstration: Demonstration) -> list[Example]:
        """Tokenise a demonstration.

        A chat is one example with all of its answers; or, where the template renders earlier turns
        in another way than the last one (some leave the thinking out), or writes no end token, one
        example for each answer: what a policy would read and write there.

        Raises:
            DataError: It cannot be rendered, or the answers cannot be told from what is around.
        """
        origin, turns = demonstration.origin, self._turns(demonstration)
        for answer in _answers_of(demonstration):
            self._refuse_end_inside(answer, origin)
        if turns is not None:
            return self._of_chat(turns, origin)
        if demonstration.text is not None:
            row = _Row(self, demonstration.text, origin)
            start = max(1, len(row.head))
            return [row.example([(start, row.close())])]
        row = _Row(self, demonstration.prompt or "", origin)
        return [row.example([row.answer(demonstration.response or "")])]

    def prompt(self, demonstration: Demonstration) -> PromptRecord:
        """Return what the last answer answers, as a rollout would read it."""
        turns, origin = self._turns(demonstration), demonstration.origin
        if turns is None:
            text, said = demonstration.prompt or "", {DEMONSTRATED: demonstration.response or ""}
            return PromptRecord(prompt=text, text=text, metadata=said, origin=origin)
        asked = [turn["content"] for turn in turns[:-1] if turn["role"] == "user"]
        return PromptRecord(
            prompt=asked[-1] if asked else turns[-2]["content"],
            text=self.rendered(turns[:-1], origin, opening=True),
            messages=tuple(turns[:-1]),
            metadata={DEMONSTRATED: turns[-1]["content"]},
            origin=origin,
        )

    def _turns(self, demonstration: Demonstration) -> tuple[Message, ...] | None:
        """Return the turns to render, or None for what stays plain."""
        if demonstration.text is not None:
            return None
        turns = chat_turns(
            demonstration.prompt,
            demonstration.messages,
            self.tokenizer,
            chat=self.chat,
            system_prompt=self.system_prompt,
            origin=demonstration.origin,
        )
        if turns is None or demonstration.messages is not None:
            return turns
        return (*turns, {"role": "assistant", "content": demonstration.response or ""})

    def _refuse_end_inside(self, answer: str, origin: str) -> None:
        ids = self.ids_of(answer.rstrip())
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        found = [i for i in ids if i in self.end_ids]
        if found:
            raise DataError(
                f"an answer holds the end token {self.tokenizer.decode(found[:1])!r} in the middle "
                "of its text, where a rollout would stop. Remove it.",
                path=origin or None,
            )

    # ------------------------------------------------------------------ chats

    def _of_chat(self, turns: Turns, origin: str) -> list[Example]:
        places = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        try:
            answers = [self._answer(turns, place, origin) for place in places]
        except _Unlike:
            if not _MARKS_ANSWERS.search(str(self.tokenizer.chat_template)):
                raise
            return [self._marked(turns, origin)]
        whole = self._joined(self.rendered(turns, origin, opening=False), answers, origin)
        if whole is not None:
            return [whole]
        rows = [(_Row(self, before, origin), answer) for before, answer in answers]
        return [row.example([row.answer(answer, trailing=False)]) for row, answer in rows]

    def _answer(self, turns: Turns, place: int, origin: str) -> tuple[str, str]:
        """Render up to an answer, and say what the answer adds."""
        before = self.rendered(turns[:place], origin, opening=True)
        upto = self.rendered(turns[: place + 1], origin, opening=False)
        if not upto.startswith(before):
            raise _Unlike(
                f"the chat template asks for the answer of turn {place + 1} with {before[-40:]!r} "
                "and then renders that answer without it, so the learned tokens would not be "
                "those of a rollout. Give another template with `model.init_args.chat_template`.",
                path=origin or None,
            )
        return before, upto[len(before) :]

    def _joined(self, full: str, answers: Sequence[tuple[str, str]], origin: str) -> Example | None:
        """Make one example of a chat; None where its turns are not rendered independently."""
        row, spans = _Row(self, answers[0][0], origin), []
        for before, answer in answers:
            if not (full.startswith(before + answer) and before.startswith(row.text)):
                return None
            row.extend(before[len(row.text) :])
            start = len(row.ids)
            row.extend(answer)
            if (stop := row.stop_after(start)) is None:
                return None
            spans.append((start, stop))
        return row.example(spans)

    def _marked(self, turns: Turns, origin: str) -> Example:
        """Take the template's own word for what the assistant wrote, and the end token after it."""
        found: Any = self.tokenizer.apply_chat_template(
            [dict(turn) for turn in turns],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        for place in range(1, len(ids)):
            mask[place] = mask[place] or (mask[place - 1] and ids[place] in self.end_ids)
        head = self.head_of(self.rendered(turns, origin, opening=False))
        extra = [] if ids[: len(head)] == head else head
        spans, place = [], len(extra)
        for learned, group in groupby(mask):
            length = len(list(group))
            if learned:
                spans.append((place, place + length))
            place += length
        row = [*extra, *ids][: spans[-1][1]] if spans else []
        return Example(ids=array("i", row), spans=tuple(spans), origin=origin)

    # ------------------------------------------------------------------ the tokenizer

    def rendered(self, turns: Turns, origin: str, *, opening: bool) -> str:
        """Render turns, with the opening of an answer at the end or without."""
        return rendered(turns, self.tokenizer, origin, opening=opening, without=_WITHOUT)

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text, without what the tokenizer adds."""
        if not text:
            return []
        # Not verbose: texts beyond the tokenizer's own limit are this module's to judge.
        encoded = self.tokenizer([text], add_special_tokens=False, verbose=False)
        return [int(i) for i in encoded["input_ids"][0]]

    def head_of(self, text: str) -> list[int]:
        """Return what the tokenizer puts before every text; ``text`` is any that it knows."""
        if self._head is None:
            self._head = special_head(self.tokenizer, text)
        return self._head


def _answers_of(demonstration: Demonstration) -> list[str]:
    if demonstration.messages is not None:
        return [t["content"] for t in demonstration.messages if t["role"] == "assistant"]
    return [] if demonstration.response is None else [demonstration.response]


class _Unlike(DataError):
    """The opening of an answer is not what the answer is rendered with."""


class _Row:
    """Ids that grow with their text, which stay as they are once they are there.

    Args:
        learner: With the tokenizer.
        text: The first part. What the tokenizer puts before every text comes first, once.
        origin: For messages.
    """

    def __init__(self, learner: Learner, text: str, origin: str) -> None:
        self.learner, self.origin, self.text = learner, origin, text
        ids = learner.ids_of(text)
        self.head = learner.head_of(text or "a")
        self._added = [] if ids[: len(self.head)] == self.head else self.head
        self.ids = [*self._added, *ids]
        if not self.ids:
            raise DataError("the prompt has no tokens.", path=origin or None)

    def extend(self, more: str) -> None:
        """Append text: tokenised with what is before it if that stays, else alone.

        Together where possible, since some tokenizers write a space before what they take for the
        beginning of a text.
        """
        whole = [*self._added, *self.learner.ids_of(self.text + more)]
        kept = whole[: len(self.ids)] == self.ids
        self.ids = whole if kept else [*self.ids, *self.learner.ids_of(more)]
        self.text += more

    def answer(self, text: str, *, trailing: bool = True) -> Span:
        """Append an answer; where it holds no end token it gets one.

        Args:
            text: The answer.
            trailing: Whether white space at its end is the answer's, and not the template's.
        """
        start, before = len(self.ids), (self.text, self.ids)
        self.extend(text)
        stop = self.stop_after(start)
        if stop is None and not trailing:
            self.text, self.ids = before
            self.extend(text.rstrip())
        return start, self.close() if stop is None else stop

    def close(self) -> int:
        """Append the tokenizer's end token, unless one is there; return the length."""
        end: Any = getattr(self.learner.tokenizer, "eos_token_id", None)
        if end is not None and self.ids[-1] not in self.learner.end_ids:
            self.ids = [*self.ids, int(end)]
        return len(self.ids)

    def stop_after(self, start: int) -> int | None:
        """Return the place after the first end token from ``start`` on: a rollout stops there."""
        ends = self.learner.end_ids
        places = (place for place in range(start, len(self.ids)) if self.ids[place] in ends)
        return next((place + 1 for place in places), None)

    def example(self, spans: Sequence[Span]) -> Example:
        """Return the row up to its last learned token."""
        kept = array("i", self.ids[: spans[-1][1]])
        return Example(ids=kept, spans=tuple(spans), origin=self.origin)
