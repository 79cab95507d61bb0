"""Sentiment by a word list."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ppo_lightning.configs.checks import require
from ppo_lightning.errors import DataError
from ppo_lightning.io import read_text
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.extras import import_extra
from ppo_lightning.rewards.texts import judged_texts
from ppo_lightning.types import Completions

# After an end mark: western ones need white space behind them ("3.5"), the wide ones do not.
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])\s*|\n+")


class LexiconReward(Reward):
    """Sentiment by VADER's word list and rules, from -1 to 1; 0 where it knows no word.

    Fast and easy to fool: a row of praising words scores near 1. That makes it good for showing
    reward hacking, and a poor judge of held-out answers. It splits words at white space, so
    Chinese or Japanese text says nothing to it, except for emoji. Needs the extra ``sentiment``.

    Args:
        per_sentence: Score the mean over sentences instead of the whole text, whose score
            approaches ±1 the longer it is.
        include_prompt: Whether the prompt is judged too.
        words: Words of one's own with their valence, about -4 to 4; they win over VADER's.
        lexicon_file: More of them: UTF-8 lines of word, tab, valence (what follows is ignored).
        extend: Whether one's own words are added to VADER's list or replace it.

    Source:
        Hutto & Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
        Social Media Text".
    """

    def __init__(
        self,
        per_sentence: bool = False,
        include_prompt: bool = False,
        words: dict[str, float] | None = None,
        lexicon_file: str | None = None,
        extend: bool = True,
    ) -> None:
        self.per_sentence = per_sentence
        self.include_prompt = include_prompt
        self.words = _checked(words or {})
        self.lexicon_file = lexicon_file
        self.extend = extend
        own = bool(self.words) or lexicon_file is not None
        require(extend or own, "`extend: false` needs `words` or a `lexicon_file`, got neither.")
        self._analyzer: Any = None

    def setup(self, device: torch.device) -> None:
        """Read the word lists.

        Raises:
            ConfigError: vaderSentiment is not installed.
            DataError: A line of the file is no word and number.
        """
        if self._analyzer is not None:
            return
        vader = import_extra(
            "vaderSentiment.vaderSentiment",
            package="vaderSentiment",
            extra="sentiment",
            needed_by="LexiconReward",
        )
        analyzer = vader.SentimentIntensityAnalyzer()
        own = dict(_lexicon(self.lexicon_file)) if self.lexicon_file is not None else {}
        base: Mapping[str, float] = analyzer.lexicon if self.extend else {}
        analyzer.lexicon = {**base, **own, **self.words}
        self._analyzer = analyzer

    def close(self) -> None:
        """Let go of the word lists."""
        self._analyzer = None

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response."""
        self.setup(torch.device("cpu"))
        texts = judged_texts(completions, include_prompt=self.include_prompt)
        return [self._mean(text) if self.per_sentence else self._compound(text) for text in texts]

    def _mean(self, text: str) -> float:
        parts = sentences(text)
        return math.fsum(map(self._compound, parts)) / len(parts) if parts else 0.0

    def _compound(self, text: str) -> float:
        return float(self._analyzer.polarity_scores(text)["compound"])


def sentences(text: str) -> list[str]:
    """Cut a text after its end marks and at line ends; blank pieces are left out."""
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def _checked(words: Mapping[str, float]) -> dict[str, float]:
    for word, valence in words.items():
        require(
            bool(word) and len(word.split()) == 1,
            f"`words` must be single words, as text is split at white space, got {word!r}.",
        )
        require(
            math.isfinite(valence), f"`words`: {word!r} must have a finite number, got {valence}."
        )
    return {word.lower(): float(valence) for word, valence in words.items()}


def _lexicon(path: str) -> Iterator[tuple[str, float]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        word, _, rest = line.partition("\t")
        try:
            valence = float(rest.split("\t")[0])
        except ValueError:
            valence = math.nan
        if not word.strip() or not math.isfinite(valence):
            message = f"must hold a word, a tab and a finite number, got {line!r:.60}."
            raise DataError(message, path=path, line=number)
        yield word.strip().lower(), valence
