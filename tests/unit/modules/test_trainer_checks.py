"""Trainer settings, one at a time, on a stand-in: on a CPU Lightning itself rewrites some of them.

What Lightning's own Trainer makes of them is in ``tests/integration/test_trainer_flags.py``.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import FSDP2Strategy
from ppo_lightning.modules.run_safety import default_checkpointing
from ppo_lightning.modules.trainer_checks import (
    check_data,
    check_supervised_trainer,
    check_trainer,
    spare_copies,
)
from tests.helpers.preferences import pair_data
from tests.helpers.runs import data_module
from tests.helpers.sft_runs import sft_data


def stand_in(**settings):
    """A trainer as far as the checks look at it, every setting at Lightning's default."""
    plain = {
        "fast_dev_run": False,
        "gradient_clip_val": None,
        "accumulate_grad_batches": 1,
        "max_steps": -1,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "limit_train_batches": 1.0,
        "overfit_batches": 0,
        "reload_dataloaders_every_n_epochs": 0,
        "precision": "32-true",
        "strategy": SingleDeviceStrategy(),
        "accelerator": CPUAccelerator(),
        "checkpoint_callbacks": [],
        "fit_loop": SimpleNamespace(epoch_loop=SimpleNamespace(max_steps=-1)),
    }
    return SimpleNamespace(**(plain | settings))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", 32])
def test_usual_settings_pass(precision):
    check_trainer(stand_in(precision=precision))


@pytest.mark.parametrize(
    ("setting", "value", "way_out"),
    [
        ("gradient_clip_val", 1.0, "max_grad_norm"),
        ("gradient_clip_val", 0.0, "max_grad_norm"),
        ("accumulate_grad_batches", 4, "microbatch_tokens"),
        ("max_steps", 0, "max_epochs"),
        ("val_check_interval", 3, "check_val_every_n_epoch"),
        ("check_val_every_n_epoch", None, "number of iterations"),
        ("val_check_interval", 1, "check_val_every_n_epoch"),
        ("limit_train_batches", 0.5, "buffer"),
        ("limit_train_batches", 1, "buffer"),
        ("overfit_batches", 0.1, "samples its own data"),
        ("reload_dataloaders_every_n_epochs", 1, "by itself"),
        ("precision", "16-mixed", "overflows.*bf16-mixed"),
        ("precision", "16-true", "overflows.*bf16-mixed"),
        ("precision", 16, "overflows.*bf16-mixed"),
        ("precision", "bf16-true", r"policy\.dtype`.*bf16-mixed"),
        ("precision", "64-true", r"policy\.dtype`.*bf16-mixed"),
        ("precision", "transformer-engine", r"policy\.dtype`.*bf16-mixed"),
    ],
)
def test_t43_t45_t62_each_is_refused_by_name_with_the_way_out(setting, value, way_out):
    with pytest.raises(ConfigError, match=rf"`trainer\.{setting}` cannot be used.*{way_out}"):
        check_trainer(stand_in(**{setting: value}))


class Subclass(DDPStrategy):
    """Lightning's DeepSpeedStrategy is one, too; it cannot be made without its package."""


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (DDPStrategy(), True),
        (DDPStrategy(gradient_as_bucket_view=False), False),
        (Subclass(), None),  # they have ways of their own
    ],
)
def test_ddp_keeps_gradients_where_they_are_sent_from(strategy, expected):
    spare_copies(SimpleNamespace(strategy=strategy))
    assert strategy._ddp_kwargs.get("gradient_as_bucket_view") is expected
    spare_copies(SimpleNamespace(strategy=SingleDeviceStrategy()))  # has none


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, Subclass])
def test_strategies_that_are_not_there_are_refused_by_name(strategy):
    with pytest.raises(ConfigError, match=rf"`trainer\.strategy`.*{strategy.__name__}.*`ddp`"):
        check_trainer(stand_in(strategy=strategy()))


def test_t48_the_first_generation_of_fsdp_is_refused_with_the_word_for_the_second():
    with pytest.raises(ConfigError, match=r"FSDPStrategy.*`fsdp` \(in Python `FSDP2Strategy\(\)`"):
        check_trainer(stand_in(strategy=FSDPStrategy()))


def test_modules_without_shards_refuse_them():
    with pytest.raises(ConfigError, match=r"FSDP2Strategy with SFTModule.*`ddp`\.$"):
        check_supervised_trainer(stand_in(strategy=FSDP2Strategy()), "SFTModule", "policy")


def test_an_accelerator_without_float64_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"`trainer\.accelerator`.*MPS.*float64.*`cuda`"):
        check_trainer(stand_in(accelerator=MPSAccelerator()))


@pytest.mark.parametrize("accelerator", [CPUAccelerator, CUDAAccelerator])
@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy, FSDP2Strategy])
def test_strategies_that_are_there_pass(strategy, accelerator):
    check_trainer(stand_in(strategy=strategy(), accelerator=accelerator()))


def test_t62_fast_dev_run_is_widened_to_a_whole_iteration():
    trainer = stand_in(fast_dev_run=True, limit_train_batches=1)
    trainer.fit_loop.epoch_loop.max_steps = 1
    check_trainer(trainer)
    assert trainer.limit_train_batches == 1.0
    assert isinstance(trainer.limit_train_batches, float)  # an int counts batches
    assert trainer.fit_loop.epoch_loop.max_steps == -1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every_n_train_steps": 5}, "every_n_train_steps"),
        ({"train_time_interval": timedelta(minutes=5)}, "train_time_interval"),
        ({"save_on_exception": True}, "save_on_exception"),
        ({"save_on_train_epoch_end": False}, "save_on_train_epoch_end: false"),
    ],
)
def test_t57_files_from_inside_an_iteration_are_refused(arguments, named):
    callback = ModelCheckpoint(**arguments)
    with pytest.raises(ConfigError, match=rf"`{named}`.*cannot be resumed"):
        check_trainer(stand_in(checkpoint_callbacks=[callback]))


def test_t57_others_save_at_the_end_of_an_iteration():
    callback = ModelCheckpoint(monitor="val/greedy/score", every_n_epochs=2)
    check_trainer(stand_in(checkpoint_callbacks=[callback, Checkpoint()]))
    assert callback._save_on_train_epoch_end is True


def test_lightnings_default_is_replaced_and_a_users_own_is_not():
    replaced = default_checkpointing(stand_in(checkpoint_callbacks=[ModelCheckpoint()]))
    assert [callback.save_last for callback in replaced] == [True]
    own = ModelCheckpoint(save_top_k=3, monitor="val/greedy/score")
    weights = ModelCheckpoint(save_weights_only=True)
    for callbacks in ([own], [weights], [], [ModelCheckpoint(), own]):
        assert default_checkpointing(stand_in(checkpoint_callbacks=callbacks)) == []


OF_STEPS = {"sft": sft_data, "reward": pair_data, "ppo": data_module}


@pytest.mark.parametrize("kind", OF_STEPS)
@pytest.mark.parametrize("given", OF_STEPS)
def test_data_of_another_step_is_refused_with_the_data_module_to_set(kind, given):
    trainer = stand_in(datamodule=OF_STEPS[given]())
    if kind == given:
        check_data(trainer, "Mine", kind)
        return
    wanted = {"sft": "data.SFT", "reward": "data.Preference", "ppo": "rollout.Rollout"}[kind]
    said = rf"cannot be \w+DataModule with Mine: set `ppo_lightning\.{wanted}DataModule`"
    with pytest.raises(ConfigError, match=said):
        check_data(trainer, "Mine", kind)


def test_data_of_the_users_own_and_modules_of_another_kind_pass():
    check_data(stand_in(datamodule=LightningDataModule()), "Mine", "sft")
    check_data(stand_in(), "Mine", "sft")
    check_data(stand_in(datamodule=pair_data()), "Mine", "critic")


def test_ppo_looks_at_its_data():
    with pytest.raises(ConfigError, match="SFTDataModule with PPOModule"):
        check_trainer(stand_in(datamodule=sft_data()))


@pytest.mark.parametrize("check", [check_trainer, lambda t: check_supervised_trainer(t, "X", "x")])
def test_t49_copies_of_a_run_that_a_launcher_started_are_refused(monkeypatch, check):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check(stand_in())
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(stand_in(strategy=DDPStrategy()))
    with pytest.raises(ConfigError, match=r"`torchrun` has started 2 processes.*`trainer.devices`"):
        check(stand_in())
