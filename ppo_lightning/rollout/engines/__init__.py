"""Engines that sample responses, behind one interface."""

from ppo_lightning.rollout.engines.asynchronous import AsyncEngine
from ppo_lightning.rollout.engines.background import BackgroundEngine
from ppo_lightning.rollout.engines.base import BatchedEngine, Decoded, RolloutEngine, StopRules
from ppo_lightning.rollout.engines.generate import GenerateEngine
from ppo_lightning.rollout.engines.native import NativeEngine
from ppo_lightning.rollout.engines.vllm import VLLMEngine

__all__ = [
    "AsyncEngine",
    "BackgroundEngine",
    "BatchedEngine",
    "Decoded",
    "GenerateEngine",
    "NativeEngine",
    "RolloutEngine",
    "StopRules",
    "VLLMEngine",
]
