"""Engines that sample responses, behind one interface."""

from ppo_lightning.rollout.engines.base import RolloutEngine, StopRules
from ppo_lightning.rollout.engines.generate import GenerateEngine
from ppo_lightning.rollout.engines.native import NativeEngine

__all__ = ["GenerateEngine", "NativeEngine", "RolloutEngine", "StopRules"]
