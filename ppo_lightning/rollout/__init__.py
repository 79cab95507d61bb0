"""From prompts to minibatches: engines, experience, loader and data module."""

from ppo_lightning.data import Prompts
from ppo_lightning.rollout.ahead import RolloutsAhead
from ppo_lightning.rollout.datamodule import RolloutDataModule
from ppo_lightning.rollout.dump import DumpedBuffer, load_buffer, save_buffer
from ppo_lightning.rollout.engines import (
    AsyncEngine,
    BackgroundEngine,
    BatchedEngine,
    Decoded,
    GenerateEngine,
    NativeEngine,
    RolloutEngine,
    StopRules,
    VLLMEngine,
)
from ppo_lightning.rollout.experience import (
    NetworkScores,
    ShapedRollout,
    build_experience,
    finite_scores,
    score_in_parts,
    score_with_networks,
    with_frozen_states,
)
from ppo_lightning.rollout.loader import RolloutLoader
from ppo_lightning.rollout.minibatches import microbatch_rows, minibatch_rows
from ppo_lightning.rollout.replay_datamodule import ReplayDataModule
from ppo_lightning.rollout.source import LookAheadSource, RolloutSource
from ppo_lightning.rollout.texts import completions_of
from ppo_lightning.rollout.versions import Freshness, PolicyVersions, judged

__all__ = [
    "AsyncEngine",
    "BackgroundEngine",
    "BatchedEngine",
    "Decoded",
    "DumpedBuffer",
    "Freshness",
    "GenerateEngine",
    "LookAheadSource",
    "NativeEngine",
    "NetworkScores",
    "PolicyVersions",
    "Prompts",
    "ReplayDataModule",
    "RolloutDataModule",
    "RolloutEngine",
    "RolloutLoader",
    "RolloutSource",
    "RolloutsAhead",
    "ShapedRollout",
    "StopRules",
    "VLLMEngine",
    "build_experience",
    "completions_of",
    "finite_scores",
    "judged",
    "load_buffer",
    "microbatch_rows",
    "minibatch_rows",
    "save_buffer",
    "score_in_parts",
    "score_with_networks",
    "with_frozen_states",
]
