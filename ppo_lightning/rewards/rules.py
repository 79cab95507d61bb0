"""Rewards that are rules: patterns, exact answers, lengths, repetition."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

from ppo_lightning.configs.checks import require, require_at_least, require_positive
from ppo_lightning.functional import repeated_ngram_fraction
from ppo_lightning.rewards.base import Reward, TokenRewards
from ppo_lightning.rewards.texts import field_column
from ppo_lightning.types import Completions


class RegexReward(Reward):
    """One score where a pattern is found in the response, another where it is not.

    Args:
        pattern: Regular expression of Python; ``(?i)`` at its head ignores case, ``(?s)`` lets a
            dot match line ends.
        reward: Score of a response that matches.
        otherwise: Score of the others.
        full_match: Whether the pattern must cover the whole response, white space around it aside.
    """

    def __init__(
        self, pattern: str, reward: float = 1.0, otherwise: float = 0.0, full_match: bool = False
    ) -> None:
        self.pattern = compiled(pattern)
        self.reward = reward
        self.otherwise = otherwise
        self.full_match = full_match

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        return [self.reward if self._fits(r) else self.otherwise for r in completions.responses]

    def _fits(self, response: str) -> bool:
        if self.full_match:
            return self.pattern.fullmatch(response.strip()) is not None
        return self.pattern.search(response) is not None


class ExactAnswerReward(Reward):
    """One score where the response is the known answer, another where it is not.

    Texts are compared without regard to white space at the ends or its amount in between. Where
    the record holds a number, numbers are compared (``1,000`` is 1000).

    Args:
        field: Field of the prompt's record that holds the answer; a list holds several right ones.
        reward: Score of a right answer.
        otherwise: Score of any other.
        pattern: What in the response is its answer: the last match of this regular expression,
            or its first group if it has one; no match is a wrong answer. Null takes the whole.
        ignore_case: Whether ``Paris`` and ``paris`` are the same.
    """

    def __init__(
        self,
        field: str = "answer",
        reward: float = 1.0,
        otherwise: float = 0.0,
        pattern: str | None = None,
        ignore_case: bool = True,
    ) -> None:
        self.field = field
        self.reward = reward
        self.otherwise = otherwise
        self.pattern = None if pattern is None else compiled(pattern)
        self.ignore_case = ignore_case

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response.

        Raises:
            RewardError: A record lacks the field.
        """
        answers = field_column(completions, self.field)
        pairs = zip(completions.responses, answers, strict=True)
        return [self.reward if self._is_right(r, a) else self.otherwise for r, a in pairs]

    def _is_right(self, response: str, answer: Any) -> bool:
        given = self._given(response)
        accepted = answer if isinstance(answer, list | tuple) else [answer]
        return given is not None and any(self._same(given, one) for one in accepted)

    def _given(self, response: str) -> str | None:
        if self.pattern is None:
            return response
        matches = list(self.pattern.finditer(response))
        return matches[-1].group(1 if self.pattern.groups else 0) if matches else None

    def _same(self, given: str, answer: Any) -> bool:
        if isinstance(answer, Real) and not isinstance(answer, bool):
            try:
                return float(given.replace(",", "")) == float(answer)
            except ValueError:
                return False
        return self._plain(given) == self._plain(str(answer))

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


class TargetLengthReward(Reward):
    """Falls in a straight line with the distance from a wanted length: ``-|n - target| / scale``.

    Args:
        target_tokens: Wanted number of sampled tokens, the end token included.
        scale: Tokens off the target that cost 1; null takes the target.
    """

    def __init__(self, target_tokens: int, scale: float | None = None) -> None:
        require_positive("target_tokens", target_tokens)
        require_positive("scale", scale)
        self.target_tokens = target_tokens
        self.scale = float(target_tokens) if scale is None else scale

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        lengths = map(len, completions.response_ids)
        return [-abs(length - self.target_tokens) / self.scale for length in lengths]


class ResponseLength(Reward):
    """The length itself, in tokens: to be watched, or held at a bound by a ``constraint``."""

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        return [float(len(ids)) for ids in completions.response_ids]


class LengthPenalty(Reward):
    """0 up to a free length, then down in a straight line to -1 at a full length, and no lower.

    Args:
        free_tokens: Sampled tokens, the end token included, that cost nothing.
        full_tokens: From this length on the whole penalty is due.
    """

    def __init__(self, free_tokens: int, full_tokens: int) -> None:
        require_at_least("free_tokens", free_tokens, 0)
        require(
            full_tokens > free_tokens,
            f"`full_tokens` must exceed `free_tokens` ({free_tokens}), got {full_tokens}.",
        )
        self.free_tokens = free_tokens
        self.full_tokens = full_tokens

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        return [-self._share(len(ids)) for ids in completions.response_ids]

    def _share(self, length: int) -> float:
        share = (length - self.free_tokens) / (self.full_tokens - self.free_tokens)
        return min(max(share, 0.0), 1.0)


class MissingEosPenalty(Reward):
    """-1 for a response that met the length limit without an end token, 0 for the others.

    As a component it is weighted, logged, and can be held at a bound;
    ``reward_processing.missing_eos_penalty`` is the same without these.
    """

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        return [-float(cut) for cut in completions.truncated]


class RepetitionPenalty(Reward):
    """Minus the share of the response's n-grams of tokens that it had used before: -1 to 0.

    Args:
        n: Tokens in an n-gram.
    """

    def __init__(self, n: int = 3) -> None:
        require(n >= 1, f"`n` must be at least 1, got {n}.")
        self.n = n

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        return [-repeated_ngram_fraction(ids, self.n) for ids in completions.response_ids]


class TokenRepetitionPenalty(Reward):
    """-1 at each token that ends an n-gram which the response has used before; per token.

    PPO is told which tokens repeat, where ``RepetitionPenalty`` says at the end how many did. Not a
    share: a response that repeats for twice as long pays twice as much.

    Args:
        n: Tokens in an n-gram.
    """

    def __init__(self, n: int = 3) -> None:
        require_at_least("n", n, 1)
        self.n = n

    def __call__(self, completions: Completions) -> TokenRewards:
        """Score each token."""
        return TokenRewards([self._row(ids) for ids in completions.response_ids])

    def _row(self, ids: Sequence[int]) -> list[float]:
        seen: set[tuple[int, ...]] = set()
        row = []
        for end in range(1, len(ids) + 1):
            ngram = tuple(ids[max(end - self.n, 0) : end])
            row.append(-float(ngram in seen))
            if len(ngram) == self.n:  # the first tokens have none yet
                seen.add(ngram)
        return row


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of the config.

    Raises:
        ValueError: It is no regular expression; says where.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"`pattern` must be a regular expression, got {pattern!r}: {error}."
        ) from error
