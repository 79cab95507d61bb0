"""Tiny runs of supervised fine-tuning through the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from ppo_lightning.configs import GroupConfig, PolicyConfig, SamplingConfig
from ppo_lightning.data import SFTDataModule
from ppo_lightning.modules import SFTModule

DEMONSTRATIONS = [
    {"prompt": "the cat", "response": " sat on the house"},
    {"prompt": "a dog ran", "response": " under the tree ."},
    {"prompt": "hello world you", "response": " like it"},
    {"prompt": "the movie is", "response": " great and good , we like it"},
    {"prompt": "who are you", "response": " i like you"},
    {"prompt": "no", "response": " yes"},
    {"prompt": "what", "response": " a red bird sat on the house and saw a small cat"},
]
HELD_OUT = [
    {"prompt": "a cat", "response": " sat on the tree"},
    {"prompt": "the film is", "response": " awful"},
    {"prompt": "why", "response": " it is"},
]


def sft_module(folder: Path, **overrides: Any) -> SFTModule:
    """A module for a tiny model, on the CPU.

    Args:
        folder: Of the tiny model.
        overrides: Arguments of ``SFTModule``; a dictionary for ``policy`` changes single settings.
    """
    policy = {"path": str(folder)} | overrides.pop("policy", {})
    settings: dict[str, Any] = {
        "actor": GroupConfig(lr=1e-3),
        "sampling": SamplingConfig(max_new_tokens=4),
    }
    return SFTModule(PolicyConfig(**policy), **(settings | overrides))


def sft_data(**overrides: Any) -> SFTDataModule:
    """Seven plain demonstrations, three a step: the third step of an epoch has one."""
    settings: dict[str, Any] = {
        "demonstrations": DEMONSTRATIONS,
        "val_demonstrations": HELD_OUT,
        "batch_size": 3,
        "chat": False,
        "seed": 3,
    }
    return SFTDataModule(**(settings | overrides))


def sft_trainer(folder: Path, **overrides: Any) -> pl.Trainer:
    """A silent trainer for two epochs that writes into ``folder``."""
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**(settings | overrides))


class StepRecorder(pl.Callback):
    """Keeps the rows of a run, its batches, and the weights after each step."""

    def __init__(self, *, weights: bool = False) -> None:
        self.rows: list[Any] = []
        self.answers: list[Any] = []
        self.read: list[list[Any]] = []
        self.keep_weights = weights
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_stats(self, trainer: Any, module: Any, stats: Any) -> None:
        self.rows.append(stats)

    def on_written_answers(self, trainer: Any, module: Any, answers: Any) -> None:
        self.answers.append(answers)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.read.append([example.origin for example in batch.examples])
        if self.keep_weights:
            self.weights.append(weights_of(module))


def weights_of(module: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the trained weights."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}


def fit_sft(
    folder: Path,
    module: SFTModule,
    data: SFTDataModule,
    *,
    ckpt: Path | None = None,
    **options: Any,
) -> StepRecorder:
    """Train, and return what was measured.

    Args:
        folder: Where the run writes.
        module: What is trained.
        data: What it learns from.
        ckpt: Checkpoint to resume.
        options: Of the Trainer; ``callbacks`` are added to the recorder, ``weights`` is its.
    """
    recorder = StepRecorder(weights=options.pop("weights", False))
    callbacks = [recorder, *options.pop("callbacks", [])]
    sft_trainer(folder, callbacks=callbacks, **options).fit(module, data, ckpt_path=ckpt)
    return recorder
