"""Lightning callbacks: what is done between the stages and iterations of a run."""

from ppo_lightning.callbacks.adaptive_kl import AdaptiveKL
from ppo_lightning.callbacks.before_after import BeforeAfter
from ppo_lightning.callbacks.buffer_scheduler import BufferScheduler
from ppo_lightning.callbacks.comparison import Change, changes_of, changes_table, pair_answers
from ppo_lightning.callbacks.doctor import Doctor
from ppo_lightning.callbacks.dump_buffers import DumpBuffers
from ppo_lightning.callbacks.ema import ActorEMA
from ppo_lightning.callbacks.entropy_target import EntropyTarget
from ppo_lightning.callbacks.gold import BestByGold, GoldEarlyStopping
from ppo_lightning.callbacks.iteration_profiler import IterationProfiler
from ppo_lightning.callbacks.max_kl import MaxKL
from ppo_lightning.callbacks.predictions import PredictionWriter
from ppo_lightning.callbacks.progress import StageProgress
from ppo_lightning.callbacks.pull_back import PullBack
from ppo_lightning.callbacks.refresh_reference import RefreshReference
from ppo_lightning.callbacks.reward_per_kl import RewardPerKL
from ppo_lightning.callbacks.rollback import CheckpointRollback
from ppo_lightning.callbacks.rollback_report import RollbackReport
from ppo_lightning.callbacks.samples import SampleTexts
from ppo_lightning.callbacks.throughput import StageTime, Throughput, stage_table, stage_times
from ppo_lightning.callbacks.treatment import TreatmentConfig
from ppo_lightning.callbacks.value_warmup import ValueWarmup
from ppo_lightning.modules.export_model import ExportModel
from ppo_lightning.modules.histogram_file import HistogramFile
from ppo_lightning.modules.metrics_file import MetricsFile, run_folder
from ppo_lightning.modules.score_report import ScoreReport
from ppo_lightning.modules.shared_gradients import SharedGradients
from ppo_lightning.modules.watchdog import Watchdog

__all__ = [
    "ActorEMA",
    "AdaptiveKL",
    "BeforeAfter",
    "BestByGold",
    "BufferScheduler",
    "Change",
    "CheckpointRollback",
    "Doctor",
    "DumpBuffers",
    "EntropyTarget",
    "ExportModel",
    "GoldEarlyStopping",
    "HistogramFile",
    "IterationProfiler",
    "MaxKL",
    "MetricsFile",
    "PredictionWriter",
    "PullBack",
    "RefreshReference",
    "RewardPerKL",
    "RollbackReport",
    "SampleTexts",
    "ScoreReport",
    "SharedGradients",
    "StageProgress",
    "StageTime",
    "Throughput",
    "TreatmentConfig",
    "ValueWarmup",
    "Watchdog",
    "changes_of",
    "changes_table",
    "pair_answers",
    "run_folder",
    "stage_table",
    "stage_times",
]
