"""From prompts to minibatches: engines, experience, loader and data module."""

from ppo_lightning.rollout.datamodule import Prompts, RolloutDataModule
from ppo_lightning.rollout.engines import GenerateEngine, NativeEngine, RolloutEngine, StopRules
from ppo_lightning.rollout.experience import (
    NetworkScores,
    ShapedRollout,
    build_experience,
    score_with_networks,
)
from ppo_lightning.rollout.loader import RolloutLoader
from ppo_lightning.rollout.minibatches import microbatch_rows, minibatch_rows
from ppo_lightning.rollout.source import RolloutSource
from ppo_lightning.rollout.texts import completions_of

__all__ = [
    "GenerateEngine",
    "NativeEngine",
    "NetworkScores",
    "Prompts",
    "RolloutDataModule",
    "RolloutEngine",
    "RolloutLoader",
    "RolloutSource",
    "ShapedRollout",
    "StopRules",
    "build_experience",
    "completions_of",
    "microbatch_rows",
    "minibatch_rows",
    "score_with_networks",
]
