"""Pairs as a reward model reads them: tokenised once, by the very function that scores later."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ppo_lightning.data.preferences.pair_batches import PairExample
from ppo_lightning.data.preferences.pairs import (
    Identical,
    PreferencePair,
    Turns,
    answer_completions,
)
from ppo_lightning.data.prompts.limits import Overlong
from ppo_lightning.data.steps.share import Share
from ppo_lightning.errors import DataError
from ppo_lightning.rewards import SequenceClassifierReward

if TYPE_CHECKING:
    from ppo_lightning.models.reward_model import ScorerTokens

__all__ = ["PairReader", "pair_examples", "split_by_prompt", "warn_of_shared_prompts"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PairReader:
    """What a reward model is shown of a prompt and its answers, in text and in tokens.

    Args:
        tokens: The model's tokenizer, template and limit.
        plain_prompts: Whether a plain prompt is a ``text`` that the answer goes on with, or the
            first turn of a ``chat``.
        include_prompt: False shows the answer alone.
    """

    tokens: ScorerTokens
    plain_prompts: Literal["text", "chat"]
    include_prompt: bool = True

    def texts(self, prompt: str | Turns, answers: Sequence[Turns]) -> list[Any]:
        """Return what the reward component built from this model would show it."""
        return list(self._component.inputs(answer_completions(prompt, answers)))

    @cached_property
    def _component(self) -> SequenceClassifierReward:
        """The component that a policy will be trained with, for how it puts texts together."""
        return SequenceClassifierReward(
            path="-", plain_prompts=self.plain_prompts, include_prompt=self.include_prompt
        )

    def rows(self, pair: PreferencePair) -> tuple[list[tuple[int, ...]], int]:
        """Tokenise a pair.

        Returns:
            Rows of the chosen and of each rejected answer, cut to the limit; and the tokens of the
            longest before it was cut.

        Raises:
            DataError: The chat template refuses the chat; names the record.
        """
        texts = self.texts(pair.prompt, [pair.chosen, *pair.rejected])
        try:
            whole = [self.tokens.whole_ids(text) for text in texts]
        except Exception as error:  # a template is a program, and raises what it likes
            message = f"the chat template refuses the chat: {error}"
            raise DataError(message, path=pair.origin or None) from error
        limit = self.tokens.max_length
        longest = max(map(len, whole))
        if limit is not None and longest > limit:
            whole = [self.tokens.token_ids(text) for text in texts]
        return [tuple(row) for row in whole], longest


def pair_examples(
    pairs: Sequence[PreferencePair],
    reader: PairReader,
    *,
    overlong: Overlong = "error",
    identical: Identical = "error",
    each: bool = True,
) -> list[PairExample]:
    """Make pairs ready for a reward model.

    Args:
        pairs: At least one.
        reader: Of the model.
        overlong: A text that is too long is an ``error``, its pair is left out (``drop``), or it
            loses its beginning (``truncate``), as it will when it is scored.
        identical: Two answers of the same tokens (in what is left of them) are an ``error``, or
            left out (``drop``).
        each: Make a pair of its own of each rejected answer; otherwise they stay together.

    Raises:
        DataError: A pair is too long or says nothing; or none is left.
    """
    examples: list[PairExample] = []
    num_long = num_same = 0
    limit = reader.tokens.max_length
    for pair in pairs:
        rows, longest = reader.rows(pair)
        if limit is not None and longest > limit:
            num_long += 1
            if overlong == "error":
                raise _too_long(pair, longest, limit)
            if overlong == "drop":
                continue
        made = _example(pair, rows, reader)
        num_same += len(pair.rejected) - len(made.rejected)
        if len(made.rejected) < len(pair.rejected) and identical == "error":
            raise _same_tokens(pair)
        if made.rejected:
            examples += [made.against(i) for i in range(len(made.rejected))] if each else [made]
    _report(len(pairs), num_long, num_same, limit, overlong)
    if not examples:
        raise DataError(f"none of {len(pairs)} pairs is left: all are too long or say nothing.")
    return [replace(example, number=number) for number, example in enumerate(examples)]


def _example(
    pair: PreferencePair, rows: Sequence[tuple[int, ...]], reader: PairReader
) -> PairExample:
    """Put a pair and its rows together, without rejected answers of the chosen one's tokens."""
    kept = [number for number, row in enumerate(rows[1:]) if row != rows[0]]
    lengths = [_length(answer, reader.tokens) for answer in (pair.chosen, *pair.rejected)]
    return PairExample(
        number=0,
        chosen=rows[0],
        rejected=tuple(rows[1 + number] for number in kept),
        chosen_length=lengths[0],
        rejected_lengths=tuple(lengths[1 + number] for number in kept),
        pair=replace(pair, rejected=tuple(pair.rejected[number] for number in kept)),
    )


def _length(answer: Turns, tokens: ScorerTokens) -> int:
    texts = [turn["content"] for turn in answer if turn["role"] == "assistant"]
    encoded = tokens.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return sum(map(len, encoded))


def _too_long(pair: PreferencePair, longest: int, limit: int) -> DataError:
    return DataError(
        f"prompt and answer have {longest} tokens, more than {limit}, the limit of the model or of "
        "`model.init_args.reading.max_length`. Raise that one, or set `overlong` to `drop` or "
        "`truncate` (their beginning).",
        path=pair.origin or None,
    )


def _same_tokens(pair: PreferencePair) -> DataError:
    return DataError(
        "`chosen` and `rejected` are the same tokens to this model, in what it is shown of them: "
        "nothing can be learned from the pair. Mend the record, show more of it "
        "(`reading.max_length`), or set `identical: drop`.",
        path=pair.origin or None,
    )


def _report(total: int, num_long: int, num_same: int, limit: int | None, overlong: str) -> None:
    if num_long:
        what = "dropped" if overlong == "drop" else "cut at the front"
        log.warning("%d of %d pairs %s: over %s tokens", num_long, total, what, limit)
    if num_same:
        log.warning("%d rejected answers left out: the chosen one's tokens", num_same)


def split_by_prompt(
    pairs: Sequence[PreferencePair], share: float
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Split pairs for training and validation so that no prompt is on both sides.

    By the same hash of the prompt as in the other data modules: more pairs, another order or
    another seed move none of them over.

    Args:
        pairs: In any order.
        share: Of the prompts that is held out, in (0, 1).

    Returns:
        ``(training, held_out)``, in the order of ``pairs``.
    """
    sides: tuple[list[PreferencePair], list[PreferencePair]] = ([], [])
    held_out = Share(share, "held out")
    for pair in pairs:
        sides[pair in held_out].append(pair)
    return sides


def warn_of_shared_prompts(train: Sequence[PairExample], held_out: Sequence[PairExample]) -> int:
    """Count held-out pairs whose prompt is among the training pairs too, and log them.

    Args:
        train: Training pairs.
        held_out: Held-out pairs.

    Returns:
        How many there are.
    """
    # Whole texts are pairs without a prompt: having none in common says nothing.
    known = {example.pair.prompt_key for example in train if example.pair.prompt}
    shared = [example for example in held_out if example.pair.prompt_key in known]
    if shared:
        log.warning(
            "the prompts of %d of %d held-out pairs also stand among the training pairs, first "
            "%s. Their accuracy may be too good; `val_share` makes a split without such.",
            len(shared),
            len(held_out),
            shared[0].pair.origin or "one",
        )
    return len(shared)
