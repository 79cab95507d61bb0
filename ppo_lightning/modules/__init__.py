"""The LightningModules."""

from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.controls import Controls, Dial, Request
from ppo_lightning.modules.held_out import Answer
from ppo_lightning.modules.ppo import PPOModule

__all__ = ["Answer", "Collected", "Controls", "Dial", "PPOModule", "Request"]
