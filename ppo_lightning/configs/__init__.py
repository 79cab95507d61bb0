"""Frozen, typed, self-checking settings, one file a topic."""

from ppo_lightning.configs.buffer import BufferConfig
from ppo_lightning.configs.guards import GuardConfig
from ppo_lightning.configs.inline import InlineRecord
from ppo_lightning.configs.kl import KLConfig, KLEstimatorName
from ppo_lightning.configs.models import (
    Checkpointing,
    CriticConfig,
    DType,
    LoraConfig,
    PolicyConfig,
    Quantization,
    ReferenceConfig,
)
from ppo_lightning.configs.optim import GroupConfig, OptimizerConfig
from ppo_lightning.configs.ppo import PPOConfig
from ppo_lightning.configs.ptx import PTXConfig
from ppo_lightning.configs.reward_model import BackboneConfig, PreferenceConfig, ReadingConfig
from ppo_lightning.configs.rewards import Constraint, RewardProcessing, WeightSchedule
from ppo_lightning.configs.sampling import SamplingConfig
from ppo_lightning.configs.staleness import StalenessConfig
from ppo_lightning.configs.validation import ValidationConfig

__all__ = [
    "BackboneConfig",
    "BufferConfig",
    "Checkpointing",
    "Constraint",
    "CriticConfig",
    "DType",
    "GroupConfig",
    "GuardConfig",
    "InlineRecord",
    "KLConfig",
    "KLEstimatorName",
    "LoraConfig",
    "OptimizerConfig",
    "PPOConfig",
    "PTXConfig",
    "PolicyConfig",
    "PreferenceConfig",
    "Quantization",
    "ReadingConfig",
    "ReferenceConfig",
    "RewardProcessing",
    "SamplingConfig",
    "StalenessConfig",
    "ValidationConfig",
    "WeightSchedule",
]
