"""Pure rules that look at settings and numbers and say what is wrong with them."""

from ppo_lightning.diagnostics.advice import (
    Advice,
    RunSettings,
    advice_text,
    review,
    review_scores,
)
from ppo_lightning.diagnostics.course import Course
from ppo_lightning.diagnostics.detectors import (
    DETECTORS,
    against_keeping,
    all_measured_finite,
    detect,
    is_judged,
    is_of_update_alone,
    trimmed,
)
from ppo_lightning.diagnostics.diagnosis import (
    SEVERITIES,
    Diagnosis,
    Evidence,
    Finding,
    Severity,
    rank_of,
    worst,
)
from ppo_lightning.diagnostics.examiner import Answer, Episode, Examiner
from ppo_lightning.diagnostics.handbook import HANDBOOK, Card, Remedy, Turn
from ppo_lightning.diagnostics.illnesses import ILLNESSES, UPDATE_ILLNESSES
from ppo_lightning.diagnostics.limits import RuleLimits
from ppo_lightning.diagnostics.notices import headline, notice
from ppo_lightning.diagnostics.own_rules import RuleError, rules_with
from ppo_lightning.diagnostics.rules import COMPANIONS, RULES, Rule, SignRule, found, seen
from ppo_lightning.diagnostics.start import (
    RewardOrigin,
    Start,
    TextReader,
    review_reward_origin,
    review_start,
)
from ppo_lightning.diagnostics.thresholds import DetectorConfig

__all__ = [
    "COMPANIONS",
    "DETECTORS",
    "HANDBOOK",
    "ILLNESSES",
    "RULES",
    "SEVERITIES",
    "UPDATE_ILLNESSES",
    "Advice",
    "Answer",
    "Card",
    "Course",
    "DetectorConfig",
    "Diagnosis",
    "Episode",
    "Evidence",
    "Examiner",
    "Finding",
    "Remedy",
    "RewardOrigin",
    "Rule",
    "RuleError",
    "RuleLimits",
    "RunSettings",
    "Severity",
    "SignRule",
    "Start",
    "TextReader",
    "Turn",
    "advice_text",
    "against_keeping",
    "all_measured_finite",
    "detect",
    "found",
    "headline",
    "is_judged",
    "is_of_update_alone",
    "notice",
    "rank_of",
    "review",
    "review_reward_origin",
    "review_scores",
    "review_start",
    "rules_with",
    "seen",
    "trimmed",
    "worst",
]
