"""All demonstrations of a source, ready to learn from."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ppo_lightning.data.demonstrations.demonstration import Demonstration, demonstration_of
from ppo_lightning.data.demonstrations.learned import Example, Learner
from ppo_lightning.data.prompts.prompt_set import Overlong
from ppo_lightning.data.records.base import Record, RecordSource, read_examples
from ppo_lightning.data.steps.share import Share
from ppo_lightning.errors import DataError
from ppo_lightning.types import PromptRecord

__all__ = ["DemonstrationSet"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DemonstrationSet:
    """Examples within the length limit; see ``build``.

    Args:
        examples: What is learned.
        prompts: What the demonstrations answer, as a rollout would read it; plain texts have none.
            Only where asked for.
        num_skipped: Records that could not be used.
        num_dropped: Examples left out because they were too long.
        num_truncated: Examples cut to the limit.
    """

    examples: tuple[Example, ...]
    prompts: tuple[PromptRecord, ...] = ()
    num_skipped: int = 0
    num_dropped: int = 0
    num_truncated: int = 0

    @classmethod
    def build(
        cls,
        source: RecordSource,
        learner: Learner,
        *,
        max_tokens: int | None = None,
        overlong: Overlong = "error",
        share: Share | None = None,
        keep_prompts: bool = False,
    ) -> DemonstrationSet:
        """Read a source and tokenise it; all records that cannot be used come in one report.

        Args:
            source: The records.
            learner: Tokenises them.
            max_tokens: Most tokens of an example; None is unlimited.
            overlong: A longer one is an ``error``, left out and counted (``drop``), or loses its
                end (``truncate``): what is left of the answer is learned, and no end token.
            share: Part of the demonstrations; None takes all.
            keep_prompts: Whether they are to be answered.

        Raises:
            DataError: Records are unusable, or none is left.
        """
        maker = _Maker(learner, max_tokens, overlong, share or Share(), keep_prompts)
        groups = read_examples(source, maker.made)
        examples = tuple(example for group in groups for example in group)
        if not examples:
            raise DataError(maker.nothing_left(), path=source.name)
        maker.tell(len(examples))
        return cls(
            examples=examples,
            prompts=tuple(maker.prompts),
            num_skipped=source.num_skipped,
            num_dropped=maker.num_dropped,
            num_truncated=maker.num_truncated,
        )

    def __len__(self) -> int:
        return len(self.examples)


class _Maker:
    """Makes the examples of each record, and counts."""

    def __init__(
        self,
        learner: Learner,
        max_tokens: int | None,
        overlong: Overlong,
        share: Share,
        keep_prompts: bool,
    ) -> None:
        self.learner, self.max_tokens = learner, max_tokens
        self.overlong, self.share = overlong, share
        self.keep_prompts = keep_prompts
        self.prompts: list[PromptRecord] = []
        self.num_dropped = self.num_truncated = 0

    def made(self, record: Record) -> list[Example]:
        demonstration = demonstration_of(record)
        if demonstration not in self.share:
            return []
        examples = [
            limited
            for example in self.learner.examples(demonstration)
            if (limited := self._limited(example, record)) is not None
        ]
        if examples:
            self._keep_prompt(demonstration)
        return examples

    def _keep_prompt(self, demonstration: Demonstration) -> None:
        if self.keep_prompts and demonstration.text is None:
            self.prompts.append(self.learner.prompt(demonstration))

    def _limited(self, example: Example, record: Record) -> Example | None:
        if not example.num_learned:
            raise record.error("has no token to learn: the chat template renders no answer.")
        limit = self.max_tokens
        if limit is None or len(example) <= limit:
            return example
        if self.overlong == "error":
            raise record.error(
                f"has {len(example)} tokens, more than the limit of {limit} (`max_tokens`, or what "
                "the policy can read). Raise it, or set `overlong` to `drop` or `truncate`."
            )
        if self.overlong == "drop":
            self.num_dropped += 1
            return None
        cut = example.cut(limit)
        if not cut.num_learned:
            raise record.error(
                f"has {example.spans[0][0]} tokens before the answer, so that the limit of {limit} "
                "leaves nothing to learn. Raise it, shorten the prompt, or leave the record out."
            )
        self.num_truncated += 1
        return cut

    def nothing_left(self) -> str:
        if self.num_dropped:
            return (
                f"all {self.num_dropped} examples are longer than the limit of {self.max_tokens} "
                "tokens (`max_tokens`, or what the policy can read) and would be dropped."
            )
        return f"holds no demonstration of the {self.share.part} part. Change `val_share`."

    def tell(self, num_left: int) -> None:
        for number, what in ((self.num_dropped, "dropped"), (self.num_truncated, "cut")):
            if number:
                total = num_left + self.num_dropped
                log.warning(
                    "%d of %d examples %s: over %d tokens", number, total, what, self.max_tokens
                )
