"""What a supervised run measures: the record of one or more optimiser steps, or of a validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ppo_lightning.metrics.schema import metric, metric_specs

_Stats = TypeVar("_Stats", bound="StepStats")


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What supervised fine-tuning and reward models have in common.

    A row is of the optimiser steps since the row before it (``train/…``), or of one validation
    (``val/…``); what was not measured is None. Subclasses add metrics.
    """

    step: int = metric(
        "run/step",
        "steps",
        "state",
        "planned optimiser steps done since the start of the run: the time axis of all logs",
        required=True,
    )
    epoch: float | None = metric(
        "run/epoch", "epochs", "state", "passes over the training examples done, with fractions"
    )
    memory_gib: float | None = metric(
        "run/memory_gib",
        "GiB",
        "largest",
        "peak memory of a rank: of the device, or of the process on a CPU",
        note="flat from row to row",
    )
    loss: float | None = metric(
        "train/loss", "loss", "ratio of totals", "training loss, total divided by total"
    )
    learning_rate: float | None = metric(
        "train/learning_rate", "", "state", "learning rate in force at the last step"
    )
    grad_norm: float | None = metric(
        "train/grad_norm",
        "",
        "mean over steps",
        "norm of the gradient before clipping",
    )
    examples: float | None = metric("train/examples", "examples", "total", "examples learned from")
    steps_skipped_nonfinite: float | None = metric(
        "train/steps_skipped_nonfinite",
        "steps",
        "total",
        "optimiser steps not taken because the loss or a gradient was not finite",
        healthy=(0, 0),
    )
    step_seconds: float | None = metric(
        "time/step", "s", "mean over steps", "seconds of an optimiser step, data and logs included"
    )
    examples_per_second: float | None = metric(
        "time/examples_per_second", "examples/s", "ratio of totals", "training examples a second"
    )
    val_loss: float | None = metric(
        "val/loss", "loss", "ratio of totals", "loss on the held-out examples"
    )
    val_examples: float | None = metric(
        "val/examples", "examples", "total", "held-out examples measured"
    )
    val_seconds: float | None = metric("time/validation", "s", "largest", "seconds of a validation")

    def to_log(self) -> dict[str, float]:
        """Return what was measured by logged name, the step first."""
        specs = metric_specs(type(self))
        values = {spec.name: getattr(self, field) for field, spec in specs.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_log(cls: type[_Stats], row: Mapping[str, float]) -> _Stats:
        """Return the record of which ``row`` is the log; unknown names are left out.

        Raises:
            KeyError: The step is missing.
        """
        names = {field: spec.name for field, spec in metric_specs(cls).items()}
        found: dict[str, Any] = {field: row[name] for field, name in names.items() if name in row}
        return cls(**found | {"step": int(row[STEP])})


STEP = metric_specs(StepStats)["step"].name
"""The time axis of supervised runs."""
