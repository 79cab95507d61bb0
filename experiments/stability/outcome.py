"""One run of a scenario, and what is kept of it."""

from __future__ import annotations

import logging
import math
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
import transformers

from experiments.stability.overlay import Overlay, merged
from experiments.stability.scenarios import ITERATIONS, SCENARIOS
from experiments.stability.world import (
    GoldReward,
    ProxyReward,
    build_policy,
    prompts,
)
from ppo_lightning.callbacks import BestByGold, CheckpointRollback
from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    GroupConfig,
    GuardConfig,
    KLConfig,
    PolicyConfig,
    PPOConfig,
    RewardProcessing,
    SamplingConfig,
    ValidationConfig,
)
from ppo_lightning.errors import CheckpointError, RewardError, UpdateError
from ppo_lightning.metrics import IterationStats
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import Reward, RewardTerm
from ppo_lightning.rollout import RolloutDataModule
from tests.helpers.optimum import silent_trainer

LAST = 5  # iterations that the end of a run is measured over


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. Figures that are not finite, or were never measured, are None.

    Args:
        scenario: Name of the sabotage.
        variant: Which mechanism.
        seed: Of prompts, sampling and shuffles.
        start: Gold score of the reference's answers.
        gold: Of the policy's answers to held-out prompts, mean of the last iterations.
        kept: The same of the checkpoint that was kept, where one was kept by its gold score.
        best: Highest gold score of an iteration.
        fall: Most that the gold score of an iteration was below its best so far.
        drop: The same of means over as many iterations as the end of a run.
        kl: KL to the reference in nats per response, mean of the last iterations.
        finite: Whether all parameters are finite.
        iterations: That were made.
        ended: Name of the error that ended the run, or "".
        rollbacks: How often it went back.
        skipped: Steps that were not taken because a number was not finite.
        dropped: Responses that were left out.
        cpu_seconds: Process time.
    """

    scenario: str
    variant: str
    seed: int
    start: float | None
    gold: float | None
    kept: float | None
    best: float | None
    fall: float | None
    drop: float | None
    kl: float | None
    finite: bool
    iterations: int
    ended: str
    rollbacks: int
    skipped: int
    dropped: int
    cpu_seconds: float

    def line(self) -> str:
        """Say it in one line."""
        figures = (f"{n} {_text(getattr(self, n))}" for n in ("gold", "best", "drop", "kl"))
        finite = "" if self.finite else ", NOT FINITE"
        ended = f", {self.ended}" if self.ended else ""
        return (
            f"{self.scenario}/{self.variant} seed {self.seed}: {', '.join(figures)}{finite}"
            f"{ended}, {self.iterations} iterations, {self.rollbacks} rollbacks, "
            f"{self.skipped} skipped, {self.dropped} dropped, {self.cpu_seconds:.1f} s"
        )


class Watch(pl.Callback):
    """Keeps the record of every iteration."""

    def __init__(self) -> None:
        self.stats: list[IterationStats] = []

    def on_iteration_end(self, trainer: Any, module: Any, stats: Any) -> None:
        """Keep it; called by the module."""
        self.stats.append(stats)


def quiet() -> None:
    """One thread, and no messages but this experiment's own."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run(name: str, variant: str, seed: int, *, iterations: int = ITERATIONS) -> Outcome:
    """Make one run.

    Args:
        name: Of the scenario.
        variant: ``without``, ``all``, or one of its remedies.
        seed: Of the run.
        iterations: PPO iterations.
    """
    overlays = SCENARIOS[name].overlays(variant)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        made = fit(Path(folder), overlays, seed=seed, iterations=iterations)
    return Outcome(
        scenario=name,
        variant=variant,
        seed=seed,
        finite=made.finite,
        ended=made.ended,
        cpu_seconds=round(time.process_time() - began, 1),
        **_figures(made),
    )


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A run that is over.

    Args:
        module: As it ended.
        stats: Of every iteration that came to its end.
        callbacks: Of the mechanisms and faults.
        ended: Name of the error that ended it, or "".
    """

    module: PPOModule
    stats: Sequence[IterationStats]
    callbacks: Sequence[pl.Callback]
    ended: str

    @property
    def finite(self) -> bool:
        """Whether all parameters are."""
        return all(bool(p.isfinite().all()) for p in self.module.parameters())

    @property
    def rollbacks(self) -> int:
        """How often it went back."""
        return sum(c.num_rollbacks for c in self.callbacks if isinstance(c, CheckpointRollback))


def fit(
    folder: Path,
    overlays: Sequence[Overlay],
    *,
    seed: int,
    iterations: int,
    num_held_out: int = 32,
) -> Fitted:
    """Run the plain setup with overlays; an error in it is caught and named.

    Args:
        folder: For model and files.
        overlays: In their order.
        seed: Of prompts, sampling, shuffles, and new weights.
        iterations: PPO iterations.
        num_held_out: Held-out prompts, answered eight times each after every iteration.
    """
    pl.seed_everything(seed, verbose=False)
    module, data = build(folder, overlays, seed=seed, num_held_out=num_held_out)
    callbacks = [callback for overlay in overlays for callback in overlay.callbacks()]
    watch, ended = Watch(), ""
    trainer = silent_trainer(
        folder,
        callbacks=[*callbacks, watch],
        max_epochs=iterations,
        enable_checkpointing=any(isinstance(c, BestByGold) for c in callbacks),
    )
    with ExitStack() as stack:
        for overlay in overlays:
            stack.enter_context(overlay.context())
        try:
            trainer.fit(module, data)
        except (CheckpointError, RewardError, UpdateError) as error:  # a result: the table names it
            ended = type(error).__name__
    return Fitted(module=module, stats=watch.stats, callbacks=callbacks, ended=ended)


def build(
    folder: Path, overlays: Sequence[Overlay], *, seed: int, num_held_out: int = 32
) -> tuple[PPOModule, RolloutDataModule]:
    """Build module and data of the plain setup with overlays."""
    settings = merged(overlays)
    reward: Reward = ProxyReward()
    gold: Reward = GoldReward()
    for overlay in overlays:
        reward, gold = overlay.reward(reward), overlay.gold(gold)
    module = PPOModule(
        policy=PolicyConfig(path=str(build_policy(folder / "policy", **settings["world"]))),
        rewards=[RewardTerm(name="proxy", component=reward)],
        gold=gold,
        critic_model=CriticConfig(**settings["critic_model"]),
        sampling=SamplingConfig(**settings["sampling"]),
        ppo=PPOConfig(**settings["ppo"]),
        kl=KLConfig(**settings["kl"]),
        actor=GroupConfig(**settings["actor"]),
        critic=GroupConfig(**settings["critic"]),
        reward_processing=RewardProcessing(**settings["reward_processing"]),
        validation=ValidationConfig(greedy=False, num_samples=8, num_texts=0),
        guards=GuardConfig(self_check="off", advice="off"),
    )
    data = RolloutDataModule(
        prompts(held_out=False),
        prompts(held_out=True, number=num_held_out),
        buffer=BufferConfig(**settings["buffer"]),
        chat=False,
        seed=seed,
    )
    return module, data


def _figures(made: Fitted) -> dict[str, Any]:
    """Reduce the records of the iterations to what is kept."""
    stats = made.stats
    answers = [s.val_sampled for s in stats if s.val_sampled is not None]
    gold = [_number(a.gold) for a in answers]
    kept = [c.best_model_score for c in made.callbacks if isinstance(c, BestByGold)]
    ends = [mean(gold[max(i - LAST, 0) : i]) for i in range(min(LAST, len(gold)), len(gold) + 1)]
    return {
        "start": _plain(stats[0].val_reference.gold if stats and stats[0].val_reference else None),
        "gold": _plain(ends[-1] if gold else None),
        "kept": _plain(float(kept[0]) if kept and kept[0] is not None else None),
        "best": _plain(max(gold, default=None)),
        "fall": _plain(_fall(gold)),
        "drop": _plain(_fall(ends) if gold else None),
        "kl": _plain(mean(_number(a.kl_ref) for a in answers[-LAST:]) if gold else None),
        "iterations": len(stats),
        "rollbacks": made.rollbacks,
        "skipped": int(sum(s.steps_skipped_nonfinite or 0 for s in stats)),
        "dropped": int(sum(s.dropped_responses or 0 for s in stats)),
    }


def _fall(scores: Sequence[float]) -> float | None:
    """Return the most that a score is below the best before it."""
    falls = [max(scores[: i + 1]) - score for i, score in enumerate(scores)]
    return max(falls, default=None)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
