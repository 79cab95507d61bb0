"""Memory, traffic and time of a run on a cluster, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppo_lightning.estimate.hardware import Hardware
from ppo_lightning.estimate.memory import Estimate
from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sizes import Sizes
from ppo_lightning.estimate.throughput import Seconds, seconds
from ppo_lightning.estimate.traffic import Traffic, traffic
from ppo_lightning.estimate.work import Work, work_of


class Predictor(Protocol):
    """What predicts memory, such as ``Estimator`` and ``SketchEstimator``."""

    def __call__(self, run: Run) -> Estimate:
        """Predict the memory of one rank."""

    def sizes(self, run: Run) -> Sizes:
        """Measure the networks of a run, as each rank computes them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes of each GPU.

    Args:
        run: Which.
        memory: Of one rank.
        sizes: Of its networks.
        work: Of one rank.
        traffic: What one rank sends in an iteration.
        seconds: Of an iteration.
        hardware: That this is for.
    """

    run: Run
    memory: Estimate
    sizes: Sizes
    work: Work
    traffic: Traffic
    seconds: Seconds
    hardware: Hardware

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of all ranks over the time of an iteration."""
        sampled = self.run.data_ranks * self.work.responses * self.work.response_tokens
        return sampled / self.seconds.total

    @property
    def fits(self) -> bool:
        """Whether the peak is within what tensors may take of a GPU."""
        return self.memory.peak.total <= self.hardware.usable_memory


def plan(run: Run, predictor: Predictor, hardware: Hardware, *, asynchronous: bool = False) -> Plan:
    """Predict what a run takes.

    Args:
        run: With strategy and ranks.
        predictor: Of its memory.
        hardware: Of a GPU and of the links.
        asynchronous: Weights are sent to a generator; see ``traffic``.
    """
    memory, sizes, work = predictor(run), predictor.sizes(run), work_of(run)
    sent = traffic(run, sizes, work, asynchronous=asynchronous)
    kept = next(stage for stage in memory.stages if stage.name == "rollout").parts
    tokens = work.at_once * (work.prompt_tokens + work.response_tokens)
    kv_bytes = kept.get("KV cache", 0) / tokens
    return Plan(
        run=run,
        memory=memory,
        sizes=sizes,
        work=work,
        traffic=sent,
        seconds=seconds(run, sizes, work, sent, hardware, kv_bytes=kv_bytes),
        hardware=hardware,
    )
