"""Rewards: components that score responses, and the pipeline from their scores to PPO's.

Importing the room loads no optional package and no model.
"""

from ppo_lightning.rewards.analysis import Distribution, Histogram, distribution, histogram
from ppo_lightning.rewards.base import Reward, RewardTerm, TokenRewards
from ppo_lightning.rewards.classifier import TextClassifierReward
from ppo_lightning.rewards.function import FunctionReward
from ppo_lightning.rewards.http import HTTPReward
from ppo_lightning.rewards.labelled import JsonlTexts, LabelledTexts, MovieReviewTexts
from ppo_lightning.rewards.learned import SequenceClassifierReward
from ppo_lightning.rewards.lexicon import LexiconReward
from ppo_lightning.rewards.normalizer import ScoreNormalizer
from ppo_lightning.rewards.pipeline import RewardPipeline, RewardResult
from ppo_lightning.rewards.rules import (
    ExactAnswerReward,
    LengthPenalty,
    MissingEosPenalty,
    RegexReward,
    RepetitionPenalty,
    ResponseLength,
    TargetLengthReward,
    TokenRepetitionPenalty,
)
from ppo_lightning.rewards.scores import Judgement, judged, scores_of

__all__ = [
    "Distribution",
    "ExactAnswerReward",
    "FunctionReward",
    "HTTPReward",
    "Histogram",
    "JsonlTexts",
    "Judgement",
    "LabelledTexts",
    "LengthPenalty",
    "LexiconReward",
    "MissingEosPenalty",
    "MovieReviewTexts",
    "RegexReward",
    "RepetitionPenalty",
    "ResponseLength",
    "Reward",
    "RewardPipeline",
    "RewardResult",
    "RewardTerm",
    "ScoreNormalizer",
    "SequenceClassifierReward",
    "TargetLengthReward",
    "TextClassifierReward",
    "TokenRepetitionPenalty",
    "TokenRewards",
    "distribution",
    "histogram",
    "judged",
    "scores_of",
]
