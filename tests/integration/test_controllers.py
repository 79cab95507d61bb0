"""The controllers in real runs: they act, and a resumed run is the one that was never stopped."""

from itertools import pairwise

import jsonargparse
import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import (
    AdaptiveKL,
    BufferScheduler,
    EntropyTarget,
    MaxKL,
    RewardPerKL,
    ValueWarmup,
)
from ppo_lightning.configs import GroupConfig, KLConfig
from ppo_lightning.errors import ConfigError
from tests.helpers.runs import data_module, fit, parameters, ppo_module

EPOCHS = 6
BUSY = {
    "adaptive": lambda: [AdaptiveKL(target=0.05, horizon=20), MaxKL(max_kl_ref=50.0)],
    "reward": lambda: [
        # Thresholds so low that it has something to do in a run this short.
        RewardPerKL(window=3, cooldown=1, min_kl_growth=1e-6, slope_share=1.0, min_gain=0.0)
    ],
    "entropy": lambda: [EntropyTarget(relative=0.999, rate=0.01), ValueWarmup(num_iterations=2)],
    "buffer": lambda: [
        BufferScheduler(window=1, frequent=1.0, patience=2, growth=1.5),
    ],
}
DIALS = {
    "adaptive": {"kl_coef", "max_kl_ref"},
    "reward": {"kl_coef"},
    "entropy": {"ent_coef", "train_actor"},
    "buffer": {"num_update_epochs", "num_prompts_factor"},
}
SCHEDULED = {
    "actor": GroupConfig(lr=3e-3, warmup=3, schedule="cosine"),
    "critic": GroupConfig(lr=3e-3, warmup=1, schedule="linear"),
}


def run(folder, model_dir, variant, *, ckpt=None):
    keep = ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    module = ppo_module(model_dir, ppo={"target_kl": 2e-3}, kl=KLConfig(coef=0.1), **SCHEDULED)
    recorder = fit(
        folder,
        module,
        data_module(),
        ckpt=ckpt,
        max_epochs=EPOCHS,
        callbacks=[*BUSY[variant](), keep],
    )
    return module, recorder


def comparable(stats):
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", BUSY)
def test_t53_a_steered_run_resumes_bitwise(tiny_llama_dir, tmp_path, variant):
    whole, recorded = run(tmp_path / "whole", tiny_llama_dir, variant)
    assert {entry["dial"] for entry in whole.controls.journal} == DIALS[variant]
    assert len(whole.controls.journal) >= 2
    file = tmp_path / f"whole/checkpoints/epoch={EPOCHS // 2 - 1}.ckpt"
    module, resumed = run(tmp_path / "resumed", tiny_llama_dir, variant, ckpt=file)
    assert [s.iteration for s in resumed.stats] == list(range(EPOCHS // 2, EPOCHS))
    for now, then in zip(resumed.stats, recorded.stats[EPOCHS // 2 :], strict=True):
        assert comparable(now) == comparable(then)
    assert module.controls.state_dict() == whole.controls.state_dict()
    for name, value in parameters(whole).items():
        assert value.equal(dict(module.named_parameters())[name]), name


def test_beta_of_the_next_buffer_is_the_adapted_one(tiny_llama_dir, tmp_path):
    law = AdaptiveKL(target=0.05, horizon=20)
    module = ppo_module(tiny_llama_dir, kl=KLConfig(coef=0.1))
    recorder = fit(tmp_path, module, data_module(), callbacks=[law])
    coefs = [s.kl_coef for s in recorder.stats]
    assert coefs[0] == 0.1
    for before, after, stats in zip(coefs, coefs[1:], recorder.stats, strict=False):
        error = min(max(stats.kl_ref / 0.05 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + error * 8 / 20))


class Weights(pl.Callback):
    """Keeps the parameters at the start and after each iteration."""

    def __init__(self):
        self.kept = []

    def on_train_start(self, trainer, module):
        self.kept.append(parameters(module))

    def on_iteration_end(self, trainer, module, stats):
        self.kept.append(parameters(module))

    def changed(self, network):
        """For each iteration, whether it changed any weight of the network."""
        names = [name for name in self.kept[0] if f".{network}." in name]
        assert names
        return [any(not a[n].equal(b[n]) for n in names) for a, b in pairwise(self.kept)]


def test_a_warming_critic_leaves_the_actor_alone(tiny_llama_dir, tmp_path):
    weights, law = Weights(), AdaptiveKL(target=0.05, horizon=20)
    callbacks = [ValueWarmup(num_iterations=2), law, weights]
    recorder = fit(
        tmp_path, ppo_module(tiny_llama_dir), data_module(), callbacks=callbacks, max_epochs=4
    )
    assert weights.changed("actor") == [False, False, True, True]
    assert weights.changed("critic") == [True, True, True, True]
    coefs = [s.kl_coef for s in recorder.stats]
    assert coefs[0] == coefs[1] == coefs[2] != coefs[3]  # a policy at rest says nothing


@pytest.mark.parametrize(("bound", "capped"), [(1e-4, 1), (50.0, 0)])
def test_a_bound_on_the_kl_ends_the_update(tiny_llama_dir, tmp_path, bound, capped):
    callbacks = [MaxKL(max_kl_ref=bound)]
    module = ppo_module(tiny_llama_dir)
    recorder = fit(tmp_path, module, data_module(), callbacks=callbacks, max_epochs=1)
    assert recorder.stats[0].kl_capped == capped


def test_a_bound_on_the_kl_ends_the_run(tiny_llama_dir, tmp_path):
    bound = MaxKL(max_kl_ref=1e-4, action="stop_run")
    recorder = fit(
        tmp_path, ppo_module(tiny_llama_dir), data_module(), callbacks=[bound], max_epochs=5
    )
    above = [s.kl_ref > 1e-4 for s in recorder.stats]
    assert len(above) < 5
    assert above == [False] * (len(above) - 1) + [True]


def test_settings_that_do_not_suit_the_run_are_refused_before_anything_is_sampled(
    tiny_llama_dir, tmp_path
):
    for callback, named in (
        (ValueWarmup(num_iterations=3), r"`trainer\.max_epochs` \(3\)"),
        (MaxKL(max_kl_ref=6.0, action="rollback"), "CheckpointRollback"),
        (AdaptiveKL(horizon=1.6), r"`horizon` must exceed 0\.2 times the 8 responses"),
    ):
        with pytest.raises(ConfigError, match=named):
            fit(tmp_path, ppo_module(tiny_llama_dir), data_module(), callbacks=[callback])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("AdaptiveKL", {"target": 4.0, "horizon": 5000, "min_coef": 0.01, "max_coef": 1.0}),
        ("RewardPerKL", {"window": 4, "on_stall": "lower_actor_lr", "cooldown": 2}),
        ("MaxKL", {"max_kl_ref_per_token": 0.1, "action": "stop_run"}),
        ("EntropyTarget", {"relative": 0.5}),
        ("ValueWarmup", {"num_iterations": 2}),
        ("BufferScheduler", {"first": "buffer", "growth": 1.5}),
    ],
)
def test_each_can_be_named_in_a_config(name, arguments):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=pl.Callback)
    entry = {"class_path": f"ppo_lightning.callbacks.{name}", "init_args": arguments}
    parsed = parser.parse_object({"callback": entry})
    callback = parser.instantiate_classes(parsed).callback
    assert type(callback).__name__ == name
