"""Rewards: components that score responses, and the pipeline from their scores to PPO's.

Importing the room loads no optional package and no model.
"""

from ppo_lightning.rewards.base import Reward, RewardTerm
from ppo_lightning.rewards.classifier import TextClassifierReward
from ppo_lightning.rewards.function import FunctionReward
from ppo_lightning.rewards.labelled import JsonlTexts, LabelledTexts, MovieReviewTexts
from ppo_lightning.rewards.learned import SequenceClassifierReward
from ppo_lightning.rewards.lexicon import LexiconReward
from ppo_lightning.rewards.normalizer import ScoreNormalizer
from ppo_lightning.rewards.pipeline import RewardPipeline, RewardResult
from ppo_lightning.rewards.rules import (
    ExactAnswerReward,
    RegexReward,
    RepetitionPenalty,
    TargetLengthReward,
)
from ppo_lightning.rewards.scores import scores_of

__all__ = [
    "ExactAnswerReward",
    "FunctionReward",
    "JsonlTexts",
    "LabelledTexts",
    "LexiconReward",
    "MovieReviewTexts",
    "RegexReward",
    "RepetitionPenalty",
    "Reward",
    "RewardPipeline",
    "RewardResult",
    "RewardTerm",
    "ScoreNormalizer",
    "SequenceClassifierReward",
    "TargetLengthReward",
    "TextClassifierReward",
    "scores_of",
]
