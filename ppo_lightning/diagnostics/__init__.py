"""Pure rules that look at settings and numbers and say what is wrong with them."""

from ppo_lightning.diagnostics.advice import (
    Advice,
    RunSettings,
    advice_text,
    review,
    review_scores,
)
from ppo_lightning.diagnostics.detectors import (
    DETECTORS,
    against_keeping,
    all_measured_finite,
    detect,
    is_judged,
    is_of_update_alone,
    trimmed,
)
from ppo_lightning.diagnostics.illnesses import ILLNESSES, UPDATE_ILLNESSES
from ppo_lightning.diagnostics.start import (
    RewardOrigin,
    Start,
    TextReader,
    review_reward_origin,
    review_start,
)
from ppo_lightning.diagnostics.thresholds import DetectorConfig

__all__ = [
    "DETECTORS",
    "ILLNESSES",
    "UPDATE_ILLNESSES",
    "Advice",
    "DetectorConfig",
    "RewardOrigin",
    "RunSettings",
    "Start",
    "TextReader",
    "advice_text",
    "against_keeping",
    "all_measured_finite",
    "detect",
    "is_judged",
    "is_of_update_alone",
    "review",
    "review_reward_origin",
    "review_scores",
    "review_start",
    "trimmed",
]
