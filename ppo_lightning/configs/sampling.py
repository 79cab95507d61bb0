"""How responses are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_fields,
    require_positive,
    require_within,
)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of responses. Nothing is taken from the model's own generation settings.

    Args:
        max_new_tokens: Most response tokens.
        min_new_tokens: End tokens are not drawn before this many tokens.
        temperature: Of the sampling distribution, above 0. Log-probabilities, ratios and KL are all
            those of the distribution at this temperature. Callbacks may turn it, between half and
            twice this, by the dial `temperature`; held-out prompts are answered at this one.
        top_k: Draw among the k likeliest tokens; 0 turns it off. Biases ratio and KL.
        top_p: Draw among the likeliest tokens of this total probability; 1 turns it off. Biases
            ratio and KL.
        stop_token_ids: End tokens beside the tokenizer's and model's own.
        stop_strings: A response ends as soon as its text contains one of these, or with the token
            where one is a special token.
        batch_size: Rows decoded at once on a rank; None decodes all together.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: Sequence[int] = ()
    stop_strings: Sequence[str] = ()
    batch_size: int | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("max_new_tokens", self.max_new_tokens, 1)
        require_within("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        require(
            self.temperature > 0,
            f"`temperature` must be above 0, got {self.temperature}: greedy rollouts have no "
            "policy gradient. Validation decodes greedily by `validation.greedy`.",
        )
        require_positive("temperature", self.temperature)
        require_at_least("top_k", self.top_k, 0)
        require(0 < self.top_p <= 1, f"`top_p` must lie in (0, 1], got {self.top_p}.")
        texts = self.stop_strings
        require(
            not isinstance(texts, str) and all(isinstance(text, str) for text in texts),
            f"`stop_strings` must be a list of texts, got {texts!r}.",
        )
        require(all(texts), "`stop_strings` must not hold an empty string.")
        require_at_least("batch_size", self.batch_size, 1)
