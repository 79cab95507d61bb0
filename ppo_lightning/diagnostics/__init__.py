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
    UPDATE_ILLNESSES,
    DetectorConfig,
    all_measured_finite,
    detect,
    trimmed,
)

__all__ = [
    "DETECTORS",
    "UPDATE_ILLNESSES",
    "Advice",
    "DetectorConfig",
    "RunSettings",
    "advice_text",
    "all_measured_finite",
    "detect",
    "review",
    "review_scores",
    "trimmed",
]
