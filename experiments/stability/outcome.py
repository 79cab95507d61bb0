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

from experiments.stability.scenarios import ITERATIONS, SCENARIOS, Overlay, merged
from experiments.stability.world import (
    MAX_NEW_TOKENS,
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
        fall: Most that the gold score was below its best so far.
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
        figures = (f"{n} {_text(getattr(self, n))}" for n in ("gold", "best", "fall", "kl"))
        finite = "" if self.finite else ", NOT FINITE"
        ended = f", {self.ended}" if self.ended else ""
        return (
            f"{self.scenario}/{self.variant} seed {self.seed}: {', '.join(figures)}{finite}{ended}, "
            f"{self.iterations} iterations, {self.rollbacks} rollbacks, {self.skipped} skipped, "
            f"{self.dropped} dropped, {self.cpu_seconds:.1f} s"
        )


class Watch(pl.Callback):
    """Keeps the record of every iteration."""

    def __init__(self) -> None:
        self.stats: list[Any] = []

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
    changes = SCENARIOS[name].changes(variant)
    with tempfile.TemporaryDirectory() as folder:
        made = _fit(Path(folder), changes, seed=seed, iterations=iterations)
    return Outcome(scenario=name, variant=variant, seed=seed, **made)


def build(
    folder: Path, changes: Sequence[Overlay], *, seed: int
) -> tuple[PPOModule, RolloutDataModule, list[pl.Callback]]:
    """Build module, data and callbacks of the plain setup with overlays."""
    settings = merged(list(changes))
    reward: Reward = ProxyReward()
    for change in changes:
        reward = change.reward(reward)
    module = PPOModule(
        policy=PolicyConfig(path=str(build_policy(folder / "policy"))),
        rewards=[RewardTerm(name="proxy", component=reward)],
        gold=GoldReward(),
        critic_model=CriticConfig(**settings["critic_model"]),
        sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
        ppo=PPOConfig(**settings["ppo"]),
        kl=KLConfig(**settings["kl"]),
        actor=GroupConfig(**settings["actor"]),
        critic=GroupConfig(**settings["critic"]),
        reward_processing=RewardProcessing(**settings["reward_processing"]),
        validation=ValidationConfig(greedy=False, num_samples=8, num_texts=0),
        guards=GuardConfig(self_check="warn", advice="off"),
    )
    data = RolloutDataModule(
        prompts(held_out=False),
        prompts(held_out=True),
        buffer=BufferConfig(**settings["buffer"]),
        chat=False,
        seed=seed,
    )
    return module, data, [callback for change in changes for callback in change.callbacks()]


def _fit(folder: Path, changes: list[Overlay], *, seed: int, iterations: int) -> dict[str, Any]:
    pl.seed_everything(seed, verbose=False)
    module, data, callbacks = build(folder, changes, seed=seed)
    watch, ended, began = Watch(), "", time.process_time()
    trainer = silent_trainer(
        folder,
        callbacks=[*callbacks, watch],
        max_epochs=iterations,
        enable_checkpointing=any(isinstance(c, BestByGold) for c in callbacks),
    )
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change.context())
        try:
            trainer.fit(module, data)
        except Exception as error:  # it is a result: the table names it
            ended = type(error).__name__
    return {
        **_figures(watch.stats, callbacks),
        "finite": all(bool(p.isfinite().all()) for p in module.parameters()),
        "ended": ended,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _figures(stats: list[Any], callbacks: Sequence[pl.Callback]) -> dict[str, Any]:
    """Reduce the records of the iterations to what is kept."""
    answers = [s.val_sampled for s in stats if s.val_sampled is not None]
    gold = [_gold(a) for a in answers]
    peaks = [max(gold[: i + 1]) for i in range(len(gold))]
    best = [c.best_model_score for c in callbacks if isinstance(c, BestByGold)]
    return {
        "start": _plain(stats[0].val_reference.gold) if stats else None,
        "gold": _plain(mean(gold[-LAST:])) if gold else None,
        "kept": _plain(float(best[0])) if best and best[0] is not None else None,
        "best": _plain(max(gold)) if gold else None,
        "fall": _plain(max(p - g for p, g in zip(peaks, gold, strict=True))) if gold else None,
        "kl": _plain(mean(a.kl_ref for a in answers[-LAST:])) if gold else None,
        "iterations": len(stats),
        "rollbacks": sum(c.num_rollbacks for c in callbacks if isinstance(c, CheckpointRollback)),
        "skipped": int(sum(s.steps_skipped_nonfinite or 0 for s in stats)),
        "dropped": int(sum(s.dropped_responses or 0 for s in stats)),
    }


def _gold(answers: Any) -> float:
    return math.nan if answers.gold is None else float(answers.gold)


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
