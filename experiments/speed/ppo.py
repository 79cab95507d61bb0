"""One size of the work by the real ``PPOModule`` under a real ``Trainer``; prints one JSON line.

    python experiments/speed/ppo.py --size M --mode variable --iters 4
    python experiments/speed/ppo.py --size M --mode variable --precision bf16-mixed --shared

The first iteration is a warm-up and is not counted. ``compare.py`` runs this in alternation with
something else.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import torch
from transformers.utils.logging import disable_progress_bar

from experiments.speed.counts import Counts
from experiments.speed.sizes import SIZES, Size, prompts, write_models
from ppo_lightning.configs import (
    BufferConfig,
    Checkpointing,
    CriticConfig,
    GroupConfig,
    GuardConfig,
    KLConfig,
    LoraConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from ppo_lightning.rollout import NativeEngine, RolloutDataModule

STAGES = {"rollout": "gen", "reward": "fwd", "scoring": "fwd", "update": "update"}
"""Of the product, by the names of the JSON line."""


RECOMPUTED: dict[str, Checkpointing] = {"nothing": False, "gates": "gates", "blocks": True}
"""Settings of ``gradient_checkpointing``."""


class Clock(pl.Callback):
    """Wall and processor time of each iteration and its stages, and the peak of the memory."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, float]] = []
        self._began: dict[str, tuple[float, float]] = {}
        self._spent: dict[str, float] = defaultdict(float)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin an iteration."""
        self._spent.clear()
        reset_peak()
        self._start("total")

    def on_stage_start(self, trainer: Any, module: Any, name: str) -> None:
        """Begin a stage."""
        self._start(name)

    def on_stage_end(self, trainer: Any, module: Any, name: str) -> None:
        """End a stage."""
        self._stop(name, STAGES.get(name, name))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Keep what the iteration took."""
        self._stop("total", "total")
        tokens = float(module.iteration_stats.num_tokens)
        self.iterations.append({**self._spent, "tokens": tokens, "hwm": memory("VmHWM")})

    def _start(self, name: str) -> None:
        self._began[name] = time.perf_counter(), time.process_time()

    def _stop(self, name: str, key: str) -> None:
        wall, cpu = self._began.pop(name)
        self._spent[key] += time.perf_counter() - wall
        self._spent[f"cpu_{key}"] += time.process_time() - cpu


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Do the work; returns what is printed."""
    given = parser().parse_args(arguments)
    return measure(SIZES[given.size], given)


def measure(size: Size, given: Any) -> dict[str, Any]:
    """Do work of a size; prints and returns the figures."""
    torch.set_num_threads(given.threads)
    quieten()
    imported, clock, counts = memory("VmRSS"), Clock(), Counts()
    with tempfile.TemporaryDirectory() as folder:
        module, trainer = run(size, given, Path(folder), clock, counts)
    result = report(given, size, clock, module)
    result["rss_mib"] = {
        "after_import": round(imported),
        "peak": round(max(row["hwm"] for row in clock.iterations)),
        "peak_total": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    result["state_mib"] = round(counts.state_mib, 1)
    result["computed_over_useful_tokens"] = round(counts.computed / counts.useful, 4)
    result["optimizer_steps_per_iter"] = trainer.global_step / len(clock.iterations)
    print(json.dumps(result), flush=True)
    return result


def options(**changes: Any) -> argparse.Namespace:
    """Return the command line's defaults but for some, for scripts that measure something else."""
    return argparse.Namespace(**{**vars(parser().parse_args([])), **changes})


def quieten() -> None:
    """Let nothing but results be said."""
    warnings.filterwarnings("ignore")
    disable_progress_bar()
    for name in ("lightning.pytorch", "ppo_lightning", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run(
    size: Size, given: Any, folder: Path, *callbacks: pl.Callback, **trainer_options: Any
) -> tuple[PPOModule, pl.Trainer]:
    """Train for some iterations.

    Args:
        size: Of the work.
        given: See ``parser``.
        folder: Takes models and the run's files.
        callbacks: What listens.
        trainer_options: Of the ``Trainer``, in the place of those that keep it bare.
    """
    write_models(size, given.mode, folder)
    module = build_module(size, given, folder)
    rows = [{"prompt": text} for text in prompts(size, size.rollout * given.iters)]
    data = RolloutDataModule(
        rows,
        buffer=BufferConfig(num_prompts=size.rollout, num_minibatches=size.minibatches),
        chat=False,
        seed=given.seed,
    )
    bare: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    bare |= {"enable_progress_bar": False, "devices": 1}
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=given.precision,
        max_epochs=given.iters,
        default_root_dir=folder / "run",
        enable_model_summary=False,
        callbacks=list(callbacks),
        **(bare | trainer_options),
    )
    trainer.fit(module, data)
    return module, trainer


def build_module(size: Size, given: Any, folder: Path) -> PPOModule:
    """Make the module of the work: the settings of the peer's script."""
    reward = SequenceClassifierReward(str(folder / "reward"), batch_size=size.rollout)
    recomputed = RECOMPUTED[given.recompute]
    separate = CriticConfig(path=str(folder / "critic"), gradient_checkpointing=recomputed)
    return PPOModule(
        PolicyConfig(
            path=str(folder / "policy"),
            lora=LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
            if given.lora
            else None,
            padding_free=not given.padded,
            gradient_checkpointing=recomputed,
        ),
        [RewardTerm(name="score", component=reward)],
        critic_model=CriticConfig(kind="shared") if given.shared else separate,
        sampling=SamplingConfig(max_new_tokens=size.response_len),
        ppo=PPOConfig(
            num_update_epochs=size.epochs,
            target_kl=None,
            vf_coef=0.1,
            microbatch_tokens=given.microbatch_tokens,
        ),
        kl=KLConfig(coef=0.05),
        actor=GroupConfig(lr=3e-6),
        critic=GroupConfig(lr=3e-6),
        guards=GuardConfig(advice="off"),
        engine=NativeEngine(dtype=given.sampler_dtype),
    )


def report(given: Any, size: Size, clock: Clock, module: PPOModule) -> dict[str, Any]:
    """Put the figures under the keys that the peer's script uses."""
    used = clock.iterations[1:] or clock.iterations

    def medians(prefix: str) -> dict[str, float]:
        names = ("gen", "fwd", "update", "total")
        return {n: round(statistics.median(r[prefix + n] for r in used), 4) for n in names}

    tokens = sum(row["tokens"] for row in used)
    return {
        "peer": "ppo_lightning",
        "size": given.size,
        "mode": given.mode,
        "rollout": size.rollout,
        "minibatches": size.minibatches,
        "ppo_epochs": size.epochs,
        "precision": given.precision,
        "shared": given.shared,
        "lora": given.lora,
        "padded": given.padded,
        "recompute": given.recompute,
        "microbatch_tokens": given.microbatch_tokens,
        "sampler_dtype": given.sampler_dtype,
        "iters_counted": len(used),
        "s_per_iter": medians(""),
        "cpu_s_per_iter": medians("cpu_"),
        "s_per_iter_min": round(min(row["total"] for row in used), 4),
        "s_per_iter_max": round(max(row["total"] for row in used), 4),
        "response_tokens_per_iter": tokens / len(used),
        "mean_response_len": round(tokens / len(used) / size.rollout, 2),
        "response_tokens_per_s": round(tokens / sum(row["total"] for row in used), 2),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load1": os.getloadavg()[0],
    }


def memory(field: str) -> float:
    """Return a field of this process's memory in MiB: ``VmRSS``, or ``VmHWM`` for the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def reset_peak() -> None:
    """Let ``VmHWM`` begin anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--size", choices=list(SIZES), default="S")
    made.add_argument("--mode", choices=["fixed", "variable"], default="variable")
    made.add_argument("--iters", type=int, default=4, help="the first is not counted")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--precision", default="32-true")
    made.add_argument("--shared", action="store_true", help="a value head on the policy's trunk")
    made.add_argument("--lora", action="store_true", help="adapters in place of all weights")
    made.add_argument("--padded", action="store_true", help="compute padding: the plain path")
    made.add_argument("--recompute", choices=list(RECOMPUTED), default="nothing")
    made.add_argument("--microbatch-tokens", type=int, default=None)
    made.add_argument("--sampler-dtype", default=None, help="of a copy that samples")
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    main()
