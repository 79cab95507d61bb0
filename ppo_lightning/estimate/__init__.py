"""What a run will take, before anything is loaded."""

from ppo_lightning.estimate.changes import Change, Fitting, find_fit
from ppo_lightning.estimate.memory import STAGES, Estimate, Estimator, StagePeak, estimate
from ppo_lightning.estimate.of_module import run_of
from ppo_lightning.estimate.process import maps_blocks
from ppo_lightning.estimate.run import Device, RewardModel, Run

__all__ = [
    "STAGES",
    "Change",
    "Device",
    "Estimate",
    "Estimator",
    "Fitting",
    "RewardModel",
    "Run",
    "StagePeak",
    "estimate",
    "find_fit",
    "maps_blocks",
    "run_of",
]
