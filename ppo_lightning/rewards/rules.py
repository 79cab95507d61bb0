"""Rewards that are rules: patterns, exact answers, lengths, repetition."""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

from ppo_lightning.configs.checks import require, require_positive
from ppo_lightning.functional import repeated_ngram_fraction
from ppo_lightning.rewards.base import Reward
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
