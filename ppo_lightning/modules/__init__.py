"""The LightningModules."""

from ppo_lightning.modules.checkpoint_files import CheckpointFiles, last_checkpoint
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.controls import Controls, Dial, Request
from ppo_lightning.modules.held_out import Answer
from ppo_lightning.modules.interrupts import StopOnSigterm
from ppo_lightning.modules.ppo import PPOModule
from ppo_lightning.modules.reward_model import RewardModule
from ppo_lightning.modules.sft import SFTModule
from ppo_lightning.modules.sharded_strategy import FSDP2Strategy
from ppo_lightning.modules.supervised import SupervisedModule
from ppo_lightning.modules.written import WrittenAnswer, WrittenAnswers
from ppo_lightning.modules.zero_strategy import ZeROStrategy

__all__ = [
    "Answer",
    "CheckpointFiles",
    "Collected",
    "Controls",
    "Dial",
    "FSDP2Strategy",
    "PPOModule",
    "Request",
    "RewardModule",
    "SFTModule",
    "StopOnSigterm",
    "SupervisedModule",
    "WrittenAnswer",
    "WrittenAnswers",
    "ZeROStrategy",
    "last_checkpoint",
]
