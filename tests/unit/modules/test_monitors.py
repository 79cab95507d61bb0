"""Which metrics a run may log, and who may watch what else."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from ppo_lightning.data import MixturePart, MixturePrompts, SplitPrompts
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.monitors import check_monitors, logged_names
from ppo_lightning.rewards import RewardTerm
from tests.helpers.runs import IdReward, ppo_module


def module_with(folder, *callbacks, held_out=("no",), **settings):
    module = ppo_module(folder, **settings)
    module._trainer = SimpleNamespace(
        callbacks=list(callbacks), datamodule=SimpleNamespace(val_prompts=held_out)
    )
    return module


def test_names_depend_on_the_settings(tiny_gpt2_dir):
    terms = [RewardTerm(name="a", component=IdReward()), RewardTerm(name="b", component=IdReward())]
    names = set(logged_names(module_with(tiny_gpt2_dir, rewards=terms, gold=IdReward())))
    assert {"rollout/reward/a/raw", "rollout/reward/b/weighted", "val/sampled/gold"} <= names
    assert {"rollout/score_mean", "update/kl_old", "time/iteration", "val/greedy/score"} <= names
    names = set(logged_names(module_with(tiny_gpt2_dir, held_out=None)))
    assert "rollout/reward/ids/raw" in names
    assert not any(name.startswith("val/") for name in names)


def test_names_of_places_and_of_the_parts_of_a_mixture(tiny_gpt2_dir):
    parts = [MixturePart(source=["a"], name="sums"), MixturePart(source=["b"])]
    module = module_with(tiny_gpt2_dir)
    assert not any(name.startswith("rollout/group/") for name in logged_names(module))
    for prompts in (MixturePrompts(parts), SplitPrompts(MixturePrompts(parts), "train")):
        module.trainer.datamodule.prompts = prompts
        names = set(logged_names(module))
        assert {"rollout/group/sums/entropy", "rollout/group/part_1/score"} <= names
        assert {"rollout/entropy_at/0/mean", "rollout/entropy_at/16384-up/mean"} <= names


def test_no_gold_without_a_judge(tiny_gpt2_dir):
    names = set(logged_names(module_with(tiny_gpt2_dir)))
    assert "val/greedy/score" in names
    assert not any("gold" in name for name in names)


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("val/greedy/score"),
        EarlyStopping("nope", strict=False),
        ModelCheckpoint(monitor="step"),
        ModelCheckpoint(),
    ],
)
def test_what_is_logged_or_may_be_missing_passes(tiny_gpt2_dir, callback):
    check_monitors(module_with(tiny_gpt2_dir, callback))


class LogsMore(pl.Callback):
    """One of the user's: who knows what it logs."""


def test_beside_a_callback_of_the_users_nothing_is_refused(tiny_gpt2_dir):
    watching = EarlyStopping("nope")
    with pytest.raises(ConfigError, match="EarlyStopping watches `monitor: nope`"):
        check_monitors(module_with(tiny_gpt2_dir, watching))
    check_monitors(module_with(tiny_gpt2_dir, watching, LogsMore()))
