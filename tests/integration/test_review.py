"""The start-up review speaks once, and can be made strict."""

import warnings

import pytest

from ppo_lightning.configs import GroupConfig, GuardConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards import Reward, RewardTerm
from tests.helpers.runs import data_module, fit, ppo_module

HASTY = {"ppo": {"num_update_epochs": 5}, "critic": GroupConfig(lr=1e-1)}


class Loud(Reward):
    def __call__(self, completions):
        return [float(i) * 100 for i in range(len(completions))]


def run(tmp_path, folder, mode, **settings):
    module = ppo_module(folder, guards=GuardConfig(advice=mode), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(tmp_path, module, data_module(), max_epochs=2, enable_checkpointing=False)
    return [str(w.message) for w in caught if "Review of the settings" in str(w.message)]


def test_hasty_settings_are_named_once(tiny_llama_dir, tmp_path):
    (said,) = run(tmp_path, tiny_llama_dir, "warn", **HASTY)
    assert "`ppo.num_update_epochs` is 5 for a buffer of 8 responses" in said
    assert "`critic.lr`" in said


def test_off_says_nothing(tiny_llama_dir, tmp_path):
    assert run(tmp_path, tiny_llama_dir, "off", **HASTY) == []


def test_error_ends_the_run_before_anything_is_sampled(tiny_llama_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"ppo\.num_update_epochs"):
        run(tmp_path, tiny_llama_dir, "error", **HASTY)


def test_scores_of_another_spread_than_beta_is_meant_for(tiny_llama_dir, tmp_path):
    """At the first iteration and not again."""
    loud = [RewardTerm(name="loud", component=Loud())]
    settings = {"ppo": {"target_kl": 0.02}, "rewards": loud}
    said = run(tmp_path, tiny_llama_dir, "warn", **settings)
    assert sum("`kl.coef` is 0.05" in message for message in said) == 1
