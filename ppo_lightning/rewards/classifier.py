"""A bag-of-words classifier as a reward: small, fast, and fitted where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ppo_lightning.configs.checks import require, require_at_least, require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.extras import import_extra
from ppo_lightning.rewards.labelled import LabelledTexts
from ppo_lightning.rewards.texts import judged_texts
from ppo_lightning.types import Completions

# Apostrophes are part of a word ("didn't"), and so are single letters and digits ("a", "2/10").
_WORD = r"(?u)\w+(?:['’]\w+)*"


class TextClassifierReward(Reward):
    """How good a text looks to a classifier fitted on labelled texts when the run starts.

    Logistic regression on tf-idf of words and word pairs. The fit has no randomness: the same
    texts give the same scores on every rank. Nothing is pickled or stored. A text without any
    known word is neither good nor bad: odds of one to one. Needs the extra ``classifier``.

    Args:
        data: Texts to learn from.
        output: ``signed`` is 2p - 1, from -1 (bad) to 1 (good); ``probability`` is p of being
            good; ``logit`` is log p/(1 - p), unbounded.
        scale: Factor on the output.
        include_prompt: Whether the prompt is judged too.
        ngrams: Longest run of words that is a feature; 2 sees "not good".
        min_count: Texts that a run of words must occur in to become a feature.
        max_words: Only so many last words of each text are learned from; null takes all. Makes
            long reviews more like short answers, and the fit faster.
        inverse_regularization: scikit-learn's ``C``; smaller gives a less certain judge.
    """

    def __init__(
        self,
        data: LabelledTexts,
        output: Literal["signed", "probability", "logit"] = "signed",
        scale: float = 1.0,
        include_prompt: bool = False,
        ngrams: int = 2,
        min_count: int = 2,
        max_words: int | None = 60,
        inverse_regularization: float = 5.0,
    ) -> None:
        require_positive("scale", scale)
        require_at_least("ngrams", ngrams, 1)
        require_at_least("min_count", min_count, 1)
        require_at_least("max_words", max_words, 1)
        require_positive("inverse_regularization", inverse_regularization)
        self.data = data
        self.output = output
        self.scale = scale
        self.include_prompt = include_prompt
        self.ngrams = ngrams
        self.min_count = min_count
        self.max_words = max_words
        self.inverse_regularization = inverse_regularization
        self._fitted: tuple[Any, Any] | None = None

    def setup(self, device: torch.device) -> None:
        """Read the texts and fit; takes a few seconds for some ten thousand texts.

        Raises:
            ConfigError: scikit-learn is not installed, or the texts cannot be learned from.
        """
        if self._fitted is None:
            self._fitted = self._fit(*self.data.read())

    def close(self) -> None:
        """Let go of the classifier."""
        self._fitted = None

    def __call__(self, completions: Completions) -> Tensor:
        """Score each response. ``[B]`` float32."""
        logits = self.logits(judged_texts(completions, include_prompt=self.include_prompt))
        return (self._output(logits) * self.scale).float()

    def logits(self, texts: Sequence[str]) -> Tensor:
        """Return log p/(1 - p) of being good.

        Args:
            texts: Any number of them.

        Returns:
            ``[B]`` float64.
        """
        self.setup(torch.device("cpu"))
        assert self._fitted is not None
        if not texts:
            return torch.zeros(0, dtype=torch.float64)
        vectorizer, classifier = self._fitted
        features = vectorizer.transform(texts)
        unknown = torch.from_numpy(features.getnnz(axis=1) == 0)
        found = torch.from_numpy(classifier.decision_function(features)).double()
        # The intercept alone says what the training texts were like, not what this text is.
        return found.masked_fill(unknown, 0)

    def _output(self, logits: Tensor) -> Tensor:
        if self.output == "logit":
            return logits
        return logits.sigmoid() if self.output == "probability" else (logits / 2).tanh()

    def _fit(self, texts: Sequence[str], labels: Sequence[int]) -> tuple[Any, Any]:
        require(
            {0, 1} == set(labels),
            f"`data` must hold texts labelled 0 and 1, got {len(texts)} texts with the labels "
            f"{sorted(set(labels))}.",
        )
        extra = {
            "package": "scikit-learn",
            "extra": "classifier",
            "needed_by": "TextClassifierReward",
        }
        text_module = import_extra("sklearn.feature_extraction.text", **extra)
        linear_module = import_extra("sklearn.linear_model", **extra)
        vectorizer = text_module.TfidfVectorizer(
            token_pattern=_WORD,
            ngram_range=(1, self.ngrams),
            min_df=self.min_count,
            sublinear_tf=True,
        )
        try:
            features = vectorizer.fit_transform([self._end(text) for text in texts])
        except ValueError as error:
            # scikit-learn's words for: no feature is left.
            raise ConfigError(
                f"`data` gives no features with `min_count: {self.min_count}`: {error}"
            ) from error
        # liblinear's primal solver: quickest on sparse text, and without random numbers.
        classifier = linear_module.LogisticRegression(
            C=self.inverse_regularization, solver="liblinear"
        )
        return vectorizer, classifier.fit(features, labels)

    def _end(self, text: str) -> str:
        return text if self.max_words is None else " ".join(text.split()[-self.max_words :])
