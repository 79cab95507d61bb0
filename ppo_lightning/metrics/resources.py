"""Metrics of time and memory, and the counters of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppo_lightning.metrics.schema import metric


def _idle(stage: str) -> Any:
    return metric(
        f"time/{stage}_idle_share",
        "share",
        "largest",
        f"share of the seconds of `time/{stage}` in which the device did not compute: on a CPU 1 - "
        "processor time of the process / (seconds x torch's threads); on a GPU 1 - the driver's "
        "utilisation, looked at four times a second",
        note="of the rank that idles most; a processor that other programs use counts as idle; on "
        "a GPU needs the package `nvidia-ml-py`",
    )


@dataclass(frozen=True, kw_only=True)
class TimeStats:
    """Where the time of an iteration goes, on the slowest rank: ``time/…``."""

    iteration_seconds: float | None = metric(
        "time/iteration", "s", "largest", "the whole iteration"
    )
    rollout_seconds: float | None = metric(
        "time/rollout", "s", "largest", "sampling of the responses"
    )
    reward_seconds: float | None = metric("time/reward", "s", "largest", "reward components")
    scoring_seconds: float | None = metric(
        "time/scoring", "s", "largest", "log-probabilities and values of the buffer, advantages"
    )
    update_seconds: float | None = metric(
        "time/update", "s", "largest", "all update epochs: forward, backward, steps"
    )
    validation_seconds: float | None = metric(
        "time/validation", "s", "largest", "answers to held-out prompts and their scores"
    )
    rollout_tokens_per_second: float | None = metric(
        "time/rollout_tokens_per_second",
        "tokens/s",
        "ratio of totals",
        "response tokens of all ranks divided by the seconds of sampling",
    )
    update_tokens_per_second: float | None = metric(
        "time/update_tokens_per_second",
        "tokens/s",
        "ratio of totals",
        "response tokens of all minibatches worked on, all ranks, divided by the update's seconds",
    )
    device_idle_share: float | None = metric(
        "time/device_idle_share",
        "share",
        "ratio of totals",
        "seconds of the iteration spent outside sampling, scoring, update and validation (reward "
        "components count as idle), divided by all its seconds",
    )
    rollout_idle_share: float | None = _idle("rollout")
    reward_idle_share: float | None = _idle("reward")
    scoring_idle_share: float | None = _idle("scoring")
    update_idle_share: float | None = _idle("update")
    validation_idle_share: float | None = _idle("validation")
    waiting_share: float | None = metric(
        "time/waiting_share",
        "share",
        "largest",
        "seconds of the iteration that a rank has waited for others in sums, agreed decisions and "
        "gathered texts of this package, transfer included, divided by all its seconds; of several "
        "ranks only",
        note="sums of gradients that the strategy makes are not in it (in shared memory they are), "
        "nor sums on a GPU, whose host goes on; a rank that never waits keeps the others waiting",
    )


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """How far the run is, and what it takes: ``run/…``."""

    iteration: int = metric(
        "run/iteration",
        "iterations",
        "state",
        "number of the iteration, from 0: the time axis of all logs",
        required=True,
    )
    optimizer_steps: float | None = metric(
        "run/optimizer_steps", "steps", "state", "optimiser steps since the start of the run"
    )
    policy_version: float | None = metric(
        "run/policy_version", "steps", "state", "optimiser steps behind the weights that sampled"
    )
    memory_gib: float | None = metric(
        "run/memory_gib",
        "GiB",
        "largest",
        "peak memory of a rank: of the device, or of the process on a CPU",
        note="flat from iteration to iteration",
    )
