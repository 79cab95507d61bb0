"""Where the time of a run went: a table of its stages when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules.stages import STAGES

_REST = "rest"
_ALL = "iteration"


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """What one stage took in an iteration, on average.

    Args:
        stage: Its name; ``rest`` is what no stage accounts for, ``iteration`` the whole.
        seconds: On the clock, of the slowest rank.
        share: Of the whole, in [0, 1].
        tokens_per_second: Response tokens of all ranks; None where the stage reads none.
    """

    stage: str
    seconds: float
    share: float
    tokens_per_second: float | None = None


class Throughput(pl.Callback):
    """Print the seconds, the share and the speed of each stage when ``fit`` ends.

    Numbers are means over iterations, which are counted from one end to the next: logging, other
    callbacks and checkpoints are part of them, and are the ``rest``. ``time/…`` has the stages of
    single iterations, up to the moment when they are logged.

    Args:
        num_warmup: First iterations that are left out, unless there are no others.
    """

    def __init__(self, num_warmup: int = 1) -> None:
        require_at_least("num_warmup", num_warmup, 0)
        self.num_warmup = num_warmup
        self._ended: list[tuple[IterationStats, float]] = []
        self._began = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ended.clear()
        self._began = time.perf_counter()

    def on_iteration_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, stats: IterationStats
    ) -> None:
        """Keep what an iteration took; called by the module on all ranks."""
        now = time.perf_counter()
        self._ended.append((stats, now - self._began))
        self._began = now

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counted = self._ended[self.num_warmup :] or self._ended
        if trainer.is_global_zero and counted:
            left_out = len(self._ended) - len(counted)
            print(f"\n{_title(len(counted), left_out)}\n\n{stage_table(stage_times(counted))}\n")


def stage_times(ended: Sequence[tuple[IterationStats, float]]) -> list[StageTime]:
    """Average the stages over iterations.

    Args:
        ended: What was measured of each iteration, and its seconds on the clock; at least one.

    Returns:
        Stages that took time, in their order, then ``rest`` and ``iteration``.
    """
    whole = mean(seconds for _, seconds in ended)
    tokens = mean(stats.num_tokens or 0.0 for stats, _ in ended)
    spent = {name: mean(_number(s, f"{name}_seconds") for s, _ in ended) for name in STAGES}
    read = {"scoring": tokens} | {
        name: mean(
            _number(s, f"{name}_tokens_per_second") * _number(s, f"{name}_seconds")
            for s, _ in ended
        )
        for name in ("rollout", "update")
    }
    rows = {name: seconds for name, seconds in spent.items() if seconds}
    rows |= {_REST: max(0.0, whole - sum(rows.values())), _ALL: whole}
    read[_ALL] = tokens
    return [
        StageTime(
            stage=name,
            seconds=seconds,
            share=seconds / whole,
            tokens_per_second=read[name] / seconds if name in read else None,
        )
        for name, seconds in rows.items()
    ]


def stage_table(rows: Sequence[StageTime]) -> str:
    """Write stages as a Markdown table that is fit for a terminal."""
    lines = ["| stage | seconds | share | response tokens/s |", "| --- | --- | --- | --- |"]
    for row in rows:
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        lines.append(f"| {row.stage} | {row.seconds:.3g} | {row.share:.1%} | {speed} |")
    return "\n".join(lines)


def _number(stats: IterationStats, field: str) -> float:
    value: Any = getattr(stats, field)
    return 0.0 if value is None else float(value)


def _title(counted: int, left_out: int) -> str:
    title = f"Time of an iteration, mean of {counted}"
    return f"{title} without the first {left_out}" if left_out else title
