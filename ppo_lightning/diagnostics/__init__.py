"""Pure rules that look at settings and numbers and say what is wrong with them."""

from ppo_lightning.diagnostics.advice import (
    Advice,
    RunSettings,
    advice_text,
    review,
    review_scores,
)

__all__ = ["Advice", "RunSettings", "advice_text", "review", "review_scores"]
