"""Trainer settings that do not fit PPO are refused by name, with the setting to use instead."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed import is_torchelastic_launched

from ppo_lightning.data import PreferenceDataModule, SFTDataModule
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.run_safety import is_lightnings_default
from ppo_lightning.modules.sharded_strategy import FSDP2Strategy
from ppo_lightning.modules.zero_strategy import ZeROStrategy
from ppo_lightning.rollout import ReplayDataModule, RolloutDataModule


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse trainer settings that manual optimisation ignores or that cut an iteration.

    ``fast_dev_run`` becomes one whole iteration.

    Raises:
        ConfigError: Names the setting and what to use instead.
    """
    # Of no effect here, as an iteration is logged once; Lightning would warn of its default.
    trainer.log_every_n_steps = 1  # type: ignore[attr-defined]
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        _whole_iteration(trainer)
    _refuse(trainer, _REFUSED, "PPOModule")
    _check_placement(trainer, "PPOModule", (*_UNCUT_WEIGHTS, FSDP2Strategy, ZeROStrategy))
    check_data(trainer, "PPOModule", "ppo")
    for callback in trainer.checkpoint_callbacks:
        _check_checkpointing(callback)


def check_supervised_trainer(trainer: pl.Trainer, name: str, group: str) -> None:
    """Refuse trainer settings that manual optimisation ignores.

    Steps are counted as Lightning counts batches, so ``max_steps``, ``val_check_interval``,
    ``limit_train_batches``, ``fast_dev_run`` and checkpoints inside an epoch keep their meaning.

    Args:
        trainer: The run's.
        name: Of the module's class.
        group: Argument of the module that holds its learning rate.

    Raises:
        ConfigError: Names the setting and what to use instead.
    """
    _refuse(trainer, _refused_by_supervised(group), name)
    _check_placement(trainer, name, _UNCUT_WEIGHTS)
    # Its advice would make files that hold the weights from before the step that they count.
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization", UserWarning)
    # An epoch's last step is logged in any case.
    shorter = r"The number of training batches \(\d+\) is smaller than the logging interval"
    warnings.filterwarnings("ignore", shorter, UserWarning)
    for callback in trainer.checkpoint_callbacks:
        faults = {
            "save_on_exception": "an exception may come in the middle of a step",
            "_train_time_interval": "Lightning ignores it under manual optimisation",
        }
        for setting, why in faults.items():
            if getattr(callback, setting, None):
                raise ConfigError(
                    f"ModelCheckpoint `{setting.lstrip('_')}` cannot be used with {name}: {why}. "
                    "Use `every_n_train_steps` or `every_n_epochs`."
                )


_DATA_OF: dict[str, tuple[type[pl.LightningDataModule], ...]] = {
    "sft": (SFTDataModule,),
    "reward": (PreferenceDataModule,),
    "ppo": (RolloutDataModule, ReplayDataModule),
}


def check_data(trainer: pl.Trainer, name: str, kind: str) -> None:
    """Refuse data of another step of the chain; data modules of the user's own pass.

    Args:
        trainer: The run's.
        name: Of the module's class.
        kind: ``sft``, ``reward`` or ``ppo``; modules of another kind take what they like.

    Raises:
        ConfigError: Names the data module that the module needs.
    """
    data = getattr(trainer, "datamodule", None)
    wanted = _DATA_OF.get(kind)
    known = tuple(one for classes in _DATA_OF.values() for one in classes)
    if wanted is None or not isinstance(data, known) or isinstance(data, wanted):
        return
    room = wanted[0].__module__.split(".")[1]
    raise ConfigError(
        f"`data.class_path` cannot be {type(data).__name__} with {name}: set "
        f"`ppo_lightning.{room}.{wanted[0].__name__}`, or train another module."
    )


def _refuse(trainer: pl.Trainer, refused: Refusals, name: str) -> None:
    for setting, is_wrong, instead in refused:
        if is_wrong(trainer):
            raise ConfigError(f"`trainer.{setting}` cannot be used with {name}: {instead}")


def _counts_batches(value: float | None) -> bool:
    """Whether a limit is less than the whole: 1.0 is all batches, but 1 is one batch."""
    return value is not None and (isinstance(value, int) or value != 1.0)


Refusals = tuple[tuple[str, Callable[[Any], bool], str], ...]
"""(setting, whether it is set to what cannot be used, what to do instead)"""

_PRECISION: Refusals = (
    (
        "precision",
        lambda t: str(t.precision) in ("16-mixed", "16-true", "16"),
        "float16 overflows in the ratio and in the losses; set `bf16-mixed` or `32-true`.",
    ),
    (
        "precision",
        lambda t: str(t.precision) not in ("32-true", "32", "bf16-mixed", "bf16"),
        "it would change the weights; their dtype is `model.init_args.policy.dtype`. Set "
        "`bf16-mixed` or `32-true`.",
    ),
)

_UNCUT = "an iteration must not be cut; "

_REFUSED: Refusals = (
    (
        "gradient_clip_val",
        lambda t: t.gradient_clip_val is not None,
        "set `model.init_args.actor.max_grad_norm` and `model.init_args.critic.max_grad_norm`.",
    ),
    (
        "accumulate_grad_batches",
        lambda t: t.accumulate_grad_batches != 1,
        "set `model.init_args.ppo.microbatch_tokens`, the token budget of one backward pass.",
    ),
    (
        "max_steps",
        lambda t: t.max_steps not in (-1, None),
        f"{_UNCUT}set `trainer.max_epochs`, the number of iterations.",
    ),
    (
        "val_check_interval",
        lambda t: _counts_batches(t.val_check_interval),
        f"{_UNCUT}set `trainer.check_val_every_n_epoch`, in iterations.",
    ),
    (
        "check_val_every_n_epoch",
        lambda t: t.check_val_every_n_epoch is None,
        "set it to a number of iterations.",
    ),
    (  # before the limits, which it sets
        "overfit_batches",
        lambda t: t.overfit_batches != 0,
        "every iteration samples its own data.",
    ),
    (
        "limit_train_batches",
        lambda t: _counts_batches(t.limit_train_batches),
        f"{_UNCUT}set `data.init_args.buffer` and `model.init_args.ppo.num_update_epochs`.",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        lambda t: t.reload_dataloaders_every_n_epochs != 0,
        "the loader makes a fresh buffer every iteration by itself.",
    ),
    *_PRECISION,
)


def _refused_by_supervised(group: str) -> Refusals:
    return (
        (
            "gradient_clip_val",
            lambda t: t.gradient_clip_val is not None,
            f"set `model.init_args.{group}.max_grad_norm`.",
        ),
        (
            "accumulate_grad_batches",
            lambda t: t.accumulate_grad_batches != 1,
            "a step's size is `data.init_args.batch_size`; `model.init_args.microbatch_tokens` is "
            "the token budget of one backward pass.",
        ),
        (
            "overfit_batches",
            lambda t: t.overfit_batches != 0,
            "every epoch is shuffled anew; give fewer examples.",
        ),
        *_PRECISION,
    )


_UNCUT_WEIGHTS: tuple[type[Strategy], ...] = (SingleDeviceStrategy, DDPStrategy)


def _check_placement(trainer: Any, name: str, tested: Sequence[type[Strategy]]) -> None:
    """Let through what has been tested, on CPU or CUDA."""
    # By the very class: Lightning's DeepSpeedStrategy is a DDPStrategy.
    strategy, accelerator = type(trainer.strategy), type(trainer.accelerator)
    if strategy not in tested:
        more = (
            ", `fsdp` (in Python `FSDP2Strategy()`), and `deepspeed_stage_1` to `_3` "
            "(`ZeROStrategy(stage=...)`)"
        )
        sharded = more if FSDP2Strategy in tested else ""
        raise ConfigError(
            f"`trainer.strategy` cannot be {strategy.__name__} with {name}: what is there is a "
            f"single device (`auto` with `devices: 1`), `ddp`{sharded}."
        )
    if accelerator not in (CPUAccelerator, CUDAAccelerator):
        raise ConfigError(
            f"`trainer.accelerator` cannot be {accelerator.__name__} with {name}, which adds up "
            "in float64 and is made for CPU and CUDA: set `cpu` or `cuda`."
        )
    _refuse_copies(strategy)


def _refuse_copies(strategy: type[Strategy]) -> None:
    """Refuse a launcher's processes that know nothing of each other: each would run it all."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if strategy is SingleDeviceStrategy and started > 1 and is_torchelastic_launched():
        raise ConfigError(
            f"`torchrun` has started {started} processes, and each would train a copy of the run: "
            "set `trainer.strategy` to `ddp` or `fsdp`, and `trainer.devices` (of one node) and "
            "`trainer.num_nodes` to the numbers that it was given."
        )


def spare_copies(trainer: Any) -> None:
    """Have DDP keep gradients in the buffers that it sends, unless the user has said otherwise.

    Else it copies each to its buffer and back at every step.
    """
    if type(trainer.strategy) is DDPStrategy:
        trainer.strategy._ddp_kwargs.setdefault("gradient_as_bucket_view", True)


def _whole_iteration(trainer: Any) -> None:
    """Let ``fast_dev_run`` run one iteration to its end instead of one minibatch."""
    trainer.limit_train_batches = 1.0
    trainer.fit_loop.epoch_loop.max_steps = -1


def _check_checkpointing(callback: Checkpoint) -> None:
    if not isinstance(callback, ModelCheckpoint):
        return
    every_n_steps: Any = getattr(callback, "_every_n_train_steps", 0)
    faults = {
        "every_n_train_steps": bool(every_n_steps) and not is_lightnings_default(callback),
        "train_time_interval": getattr(callback, "_train_time_interval", None) is not None,
        "save_on_exception": bool(getattr(callback, "save_on_exception", False)),
        "save_on_train_epoch_end: false": callback._save_on_train_epoch_end is False,
    }
    for setting, wrong in faults.items():
        if wrong:
            raise ConfigError(
                f"ModelCheckpoint `{setting}` cannot be used with PPOModule: a file written inside "
                "an iteration cannot be resumed. Use `every_n_epochs: 1` and "
                "`save_on_train_epoch_end: true`; an epoch is an iteration."
            )
    callback._save_on_train_epoch_end = True
