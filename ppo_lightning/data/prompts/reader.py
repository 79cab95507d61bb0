"""How prompts of any source become token ids: one set of settings, handed from feed to feed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ppo_lightning.data.prompts.identity import Likeness, prompt_key
from ppo_lightning.data.prompts.limits import Limited, Overlong, within_limit
from ppo_lightning.data.prompts.raw import RawPrompt
from ppo_lightning.data.prompts.rendering import Chat, Tokenizer, render, tokenize_all
from ppo_lightning.errors import DataError

__all__ = ["PromptReader", "distinct"]


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Settings by which prompts are read.

    Args:
        tokenizer: The policy's.
        chat: Whether plain strings become a user turn; see ``render``.
        system_prompt: First turn of chats that have no system turn.
        max_prompt_tokens: Most tokens of a prompt, template and BOS included.
        overlong: What happens to a longer prompt; see ``PromptSet.build``.
        deduplicate: Prompts that came before are left out; None keeps them.
        keep: Tells the prompts of this part from others; None keeps all.

    Raises:
        DataError: ``max_prompt_tokens`` is below 1.
    """

    tokenizer: Tokenizer
    chat: Chat = "auto"
    system_prompt: str | None = None
    max_prompt_tokens: int | None = None
    overlong: Overlong = "error"
    deduplicate: Likeness | None = None
    keep: Callable[[RawPrompt], bool] | None = None
    _problems: dict[tuple[str, ...] | None, str | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        limit = self.max_prompt_tokens
        if limit is not None and limit < 1:
            raise DataError(f"`max_prompt_tokens` must be at least 1, got {limit}.")

    def narrowed(self, keep: Callable[[RawPrompt], bool]) -> PromptReader:
        """Return a reader that also leaves out what ``keep`` does not want."""
        before = self.keep
        both = keep if before is None else lambda raw: before(raw) and keep(raw)
        return replace(self, keep=both)

    def wants(self, raw: RawPrompt) -> bool:
        """Whether a prompt belongs to the part that is read."""
        return self.keep is None or self.keep(raw)

    def check(self, raw: RawPrompt) -> None:
        """Make sure that a prompt can be rendered, as far as the roles of its turns tell.

        A template refuses chats for the order of their roles, as a rule, so one chat of each order
        is rendered: rendering all of a large file would take minutes.

        Raises:
            DataError: It cannot.
        """
        roles = None if raw.messages is None else tuple(turn["role"] for turn in raw.messages)
        if roles not in self._problems:
            self._problems[roles] = self._problem(raw)
        problem = self._problems[roles]
        if problem is not None:
            raise DataError(problem, path=raw.origin or None)

    def _problem(self, raw: RawPrompt) -> str | None:
        try:
            render(raw, self.tokenizer, chat=self.chat, system_prompt=self.system_prompt)
        except DataError as error:
            return str(error.args[0])
        return None

    def tokenized(self, raws: Sequence[RawPrompt]) -> Limited:
        """Render and tokenise prompts, and apply the length limit.

        Raises:
            DataError: A prompt cannot be rendered, has no tokens or is too long.
        """
        options = {"chat": self.chat, "system_prompt": self.system_prompt}
        records = [render(raw, self.tokenizer, **options) for raw in raws]  # type: ignore[arg-type]
        ids = tokenize_all(records, self.tokenizer)
        for record, tokens in zip(records, ids, strict=True):
            if not tokens:
                raise DataError("the prompt has no tokens.", path=record.origin or None)
        return within_limit(
            records,
            [tuple(row) for row in ids],
            self.tokenizer,
            limit=self.max_prompt_tokens,
            overlong=self.overlong,
        )


def distinct(raws: Iterable[RawPrompt], likeness: Likeness | None) -> Iterator[RawPrompt | None]:
    """Yield prompts, and None in the place of those that came before.

    Args:
        raws: The prompts.
        likeness: When two are the same one; None lets all through.
    """
    seen: set[int] = set()
    for raw in raws:
        key = None if likeness is None else prompt_key(raw, likeness=likeness)
        if key is None:
            yield raw
            continue
        yield None if key in seen else raw
        seen.add(key)
