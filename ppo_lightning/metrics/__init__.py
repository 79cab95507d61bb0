"""What is measured: the one table of names, the totals behind it, and the file it goes to.

Totals need torch, which takes seconds to load, and are looked up on first use: who only reads what
was measured does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppo_lightning.metrics.resources import RunStats, TimeStats
from ppo_lightning.metrics.reward_model import RewardModelStats
from ppo_lightning.metrics.rollout import ComponentStats, RolloutStats
from ppo_lightning.metrics.schema import (
    SCHEMA_VERSION,
    MetricSpec,
    SectionSpec,
    metric,
    metric_specs,
    section_specs,
)
from ppo_lightning.metrics.sft import SFTStats
from ppo_lightning.metrics.slices import MOST_GROUPS, POSITIONS, GroupStats, PositionStats
from ppo_lightning.metrics.staleness import StalenessStats
from ppo_lightning.metrics.stats import IterationStats
from ppo_lightning.metrics.supervised import STEP, StepStats
from ppo_lightning.metrics.update import UpdateStats
from ppo_lightning.metrics.validation import AnswerStats
from ppo_lightning.metrics.writer import MetricsWriter, read_metrics, read_step_metrics

if TYPE_CHECKING:
    from ppo_lightning.metrics.accumulators import Sums, deviation, quotient
    from ppo_lightning.metrics.histograms import (
        BufferHistograms,
        HistogramWriter,
        read_histograms,
    )

__all__ = [
    "MOST_GROUPS",
    "POSITIONS",
    "SCHEMA_VERSION",
    "STEP",
    "AnswerStats",
    "BufferHistograms",
    "ComponentStats",
    "GroupStats",
    "HistogramWriter",
    "IterationStats",
    "MetricSpec",
    "MetricsWriter",
    "PositionStats",
    "RewardModelStats",
    "RolloutStats",
    "RunStats",
    "SFTStats",
    "SectionSpec",
    "StalenessStats",
    "StepStats",
    "Sums",
    "TimeStats",
    "UpdateStats",
    "deviation",
    "metric",
    "metric_specs",
    "quotient",
    "read_histograms",
    "read_metrics",
    "read_step_metrics",
    "section_specs",
]


_NEED_TORCH = {
    **dict.fromkeys(("Sums", "deviation", "quotient"), "accumulators"),
    **dict.fromkeys(("BufferHistograms", "HistogramWriter", "read_histograms"), "histograms"),
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use (PEP 562)."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"ppo_lightning.metrics.{_NEED_TORCH[name]}")
    value = globals()[name] = getattr(room, name)
    return value
