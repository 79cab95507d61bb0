"""Validation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.configs.checks import require, require_at_least, require_fields


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How held-out prompts are answered.

    Args:
        greedy: Answer each prompt once with the likeliest tokens.
        num_samples: Sampled answers for each prompt, with the same random numbers every time.
        num_texts: Prompts whose answers are kept side by side with the reference's.
    """

    greedy: bool = True
    num_samples: int = 1
    num_texts: int = 5

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("num_samples", self.num_samples, 0)
        require_at_least("num_texts", self.num_texts, 0)
        require(self.greedy or self.num_samples > 0, "`greedy: false` needs `num_samples` >= 1.")
