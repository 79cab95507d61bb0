"""Lightning callbacks: what is done between the stages and iterations of a run."""

from ppo_lightning.callbacks.before_after import BeforeAfter
from ppo_lightning.callbacks.comparison import Change, changes_of, changes_table, pair_answers
from ppo_lightning.callbacks.dump_buffers import DumpBuffers
from ppo_lightning.callbacks.predictions import PredictionWriter
from ppo_lightning.callbacks.progress import StageProgress
from ppo_lightning.callbacks.samples import SampleTexts
from ppo_lightning.modules.metrics_file import MetricsFile, run_folder

__all__ = [
    "BeforeAfter",
    "Change",
    "DumpBuffers",
    "MetricsFile",
    "PredictionWriter",
    "SampleTexts",
    "StageProgress",
    "changes_of",
    "changes_table",
    "pair_answers",
    "run_folder",
]
