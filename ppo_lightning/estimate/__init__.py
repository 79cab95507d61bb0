"""What a run will take, before anything is loaded."""

from ppo_lightning.estimate.architectures import ARCHITECTURES, Architecture, named_architecture
from ppo_lightning.estimate.changes import Change, Fitting, find_fit
from ppo_lightning.estimate.hardware import HARDWARE, Hardware, hardware_of
from ppo_lightning.estimate.memory import Estimate, Estimator, estimate
from ppo_lightning.estimate.of_module import run_of
from ppo_lightning.estimate.plan import Plan, Predictor, plan
from ppo_lightning.estimate.process import maps_blocks
from ppo_lightning.estimate.run import Device, RewardModel, Run
from ppo_lightning.estimate.sizes import NetworkSize, Sizes
from ppo_lightning.estimate.sketch import SketchEstimator
from ppo_lightning.estimate.stages import STAGES, StagePeak
from ppo_lightning.estimate.strategy import Strategy, strategy_of
from ppo_lightning.estimate.throughput import Seconds
from ppo_lightning.estimate.traffic import Traffic
from ppo_lightning.estimate.work import Work

__all__ = [
    "ARCHITECTURES",
    "HARDWARE",
    "STAGES",
    "Architecture",
    "Change",
    "Device",
    "Estimate",
    "Estimator",
    "Fitting",
    "Hardware",
    "NetworkSize",
    "Plan",
    "Predictor",
    "RewardModel",
    "Run",
    "Seconds",
    "Sizes",
    "SketchEstimator",
    "StagePeak",
    "Strategy",
    "Traffic",
    "Work",
    "estimate",
    "find_fit",
    "hardware_of",
    "maps_blocks",
    "named_architecture",
    "plan",
    "run_of",
    "strategy_of",
]
