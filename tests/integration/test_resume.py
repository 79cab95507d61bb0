"""A stopped and resumed run is the run that was never stopped."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.configs import GroupConfig, LoraConfig, ReferenceConfig
from ppo_lightning.errors import CheckpointError
from ppo_lightning.modules import PPOModule
from ppo_lightning.rewards import RewardTerm, SequenceClassifierReward
from tests.helpers.runs import data_module, fit, parameters, ppo_module
from tests.helpers.tiny_models import build_llama, build_reward_model

VARIANTS = {
    "separate": {},
    "shared": {"critic_model": {"kind": "shared"}},
    "lora": {"policy": {"lora": LoraConfig(rank=4)}},
    "kl_stopped": {"ppo": {"target_kl": 1e-4}},
    "penalty": {"ppo": {"objective": "penalty"}},
}
SCHEDULED = {
    "actor": GroupConfig(lr=1e-3, warmup=3, schedule="cosine"),
    "critic": GroupConfig(lr=3e-3, warmup=1, schedule="linear"),
}


def keep_all():
    return ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


def run(folder, model_dir, variant, *, ckpt=None, epochs=3):
    module = ppo_module(model_dir, **VARIANTS[variant], **SCHEDULED)
    recorder = fit(
        folder,
        module,
        data_module(val_prompts=["the cat", "hello you"]),
        ckpt=ckpt,
        max_epochs=epochs,
        callbacks=[keep_all()],
    )
    return module, recorder


def comparable(stats):
    return {k: v for k, v in stats.to_log().items() if k[:5] != "time/" and k != "run/memory_gib"}


# Lightning says that files of another folder are not tracked any more: these resume elsewhere.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("tiny_model_dir", "variant"),
    [
        ("gpt2", "separate"),
        ("llama", "shared"),
        ("llama", "lora"),
        ("gpt2", "kl_stopped"),
        ("llama", "penalty"),
        # Each variant with the other family.
        pytest.param("llama", "separate", marks=pytest.mark.slow),
        pytest.param("gpt2", "shared", marks=pytest.mark.slow),
        pytest.param("gpt2", "lora", marks=pytest.mark.slow),
        pytest.param("llama", "kl_stopped", marks=pytest.mark.slow),
        pytest.param("gpt2", "penalty", marks=pytest.mark.slow),
    ],
    indirect=["tiny_model_dir"],
)
def test_resume_is_bitwise(tiny_model_dir, tmp_path, variant):
    """T51, T52, T53: weights, moments, schedules, data order, random numbers, from every file."""
    whole, recorded = run(tmp_path / "whole", tiny_model_dir, variant)
    if variant == "kl_stopped":
        assert recorded.stats[1].kl_stopped == 1
    files = sorted((tmp_path / "whole/checkpoints").glob("epoch=*.ckpt"))
    assert len(files) == 3
    for after, file in enumerate(files[:2], start=1):
        pl.seed_everything(99, verbose=False)  # nothing may hang on the global generator
        module, resumed = run(tmp_path / f"resumed{after}", tiny_model_dir, variant, ckpt=file)
        assert [s.iteration for s in resumed.stats] == list(range(after, 3))
        for now, then in zip(resumed.stats, recorded.stats[after:], strict=True):
            assert comparable(now) == comparable(then)
        for name, value in parameters(whole).items():
            assert value.equal(dict(module.named_parameters())[name]), name


def test_an_iteration_that_the_kl_limit_stopped_is_validated_and_monitored(
    tiny_llama_dir, tmp_path
):
    """T62: its own value, not that of the iteration before."""
    best = ModelCheckpoint(
        monitor="val/greedy/entropy",
        save_top_k=-1,
        filename="{epoch}",
        save_on_train_epoch_end=True,
    )
    module = ppo_module(tiny_llama_dir, ppo={"target_kl": 1e-5})
    recorder = fit(
        tmp_path, module, data_module(val_prompts=["the cat"]), callbacks=[best], max_epochs=3
    )
    assert all(s.kl_stopped for s in recorder.stats)
    values = [float(v) for v in best.best_k_models.values()]
    own = [s.val_greedy.entropy for s in recorder.stats]
    assert len(set(own)) == 3
    assert values == pytest.approx(own)


def test_t55_t56_a_checkpoint_holds_what_is_trained_and_loads_with_weights_only(
    tiny_model_dir, tmp_path
):
    for variant in ("separate", "lora"):
        module, _ = run(tmp_path / variant, tiny_model_dir, variant, epochs=1)
        file = tmp_path / variant / "checkpoints/epoch=0.ckpt"
        checkpoint = torch.load(file, weights_only=True)
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        saved = set(checkpoint["state_dict"])
        assert trained <= saved
        assert not any("reference" in key for key in saved)
        frozen = {
            name
            for name, p in module.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        assert not frozen & saved
        assert checkpoint["ppo_lightning"]["complete"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_t51_a_checkpoint_without_the_critic_is_refused(tiny_llama_dir, tmp_path):
    run(tmp_path / "a", tiny_llama_dir, "separate", epochs=1)
    file = tmp_path / "a/checkpoints/epoch=0.ckpt"
    checkpoint = torch.load(file, weights_only=True)
    weights = checkpoint["state_dict"]
    checkpoint["state_dict"] = {k: v for k, v in weights.items() if "critic" not in k}
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    with pytest.raises(CheckpointError, match="critic"):
        run(tmp_path / "b", tiny_llama_dir, "separate", ckpt=tmp_path / "bare.ckpt")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_t55_other_base_weights_are_refused(tiny_llama_dir, tmp_path):
    run(tmp_path / "a", tiny_llama_dir, "lora", epochs=1)
    other = build_llama(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="base weights"):
        run(tmp_path / "b", other, "lora", ckpt=tmp_path / "a/checkpoints/epoch=0.ckpt")


def with_reference(path):
    return {"reference": ReferenceConfig(path=str(path))}


def with_judge(path):
    reward = SequenceClassifierReward(str(path))
    return {"rewards": [RewardTerm(name="judge", component=reward)]}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("build", "settings", "named"),
    [
        (build_llama, with_reference, r"^`reference\.path`: other weights"),
        (build_reward_model, with_judge, "^`path` of the reward `judge`: other weights"),
    ],
)
def test_t55_another_reference_or_learned_reward_is_refused(
    tiny_llama_dir, tmp_path, build, settings, named
):
    first, other = build(tmp_path / "first", seed=5), build(tmp_path / "other", seed=6)
    fit(tmp_path / "a", ppo_module(tiny_llama_dir, **settings(first)), data_module(), max_epochs=1)
    file = tmp_path / "a/checkpoints/last.ckpt"
    with pytest.raises(CheckpointError, match=named):
        fit(tmp_path / "b", ppo_module(tiny_llama_dir, **settings(other)), data_module(), ckpt=file)
    again = ppo_module(tiny_llama_dir, **settings(first))
    assert len(fit(tmp_path / "c", again, data_module(), ckpt=file, max_epochs=2).stats) == 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_file_written_inside_an_iteration_is_refused(tiny_llama_dir, tmp_path):
    file = tmp_path / "inside.ckpt"

    class Saver(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            trainer.save_checkpoint(file)

    fit(
        tmp_path / "a",
        ppo_module(tiny_llama_dir),
        data_module(val_prompts=["no"]),
        callbacks=[Saver()],
        max_epochs=1,
    )
    with pytest.raises(CheckpointError, match="inside an iteration"):
        fit(tmp_path / "b", ppo_module(tiny_llama_dir), data_module(val_prompts=["no"]), ckpt=file)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_foreign_checkpoints_are_refused(tiny_llama_dir, tmp_path):
    run(tmp_path / "a", tiny_llama_dir, "separate", epochs=1)
    checkpoint = torch.load(tmp_path / "a/checkpoints/epoch=0.ckpt", weights_only=True)
    del checkpoint["ppo_lightning"]
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(CheckpointError, match=r"policy\.path"):
        run(tmp_path / "b", tiny_llama_dir, "separate", ckpt=tmp_path / "foreign.ckpt")


def test_t57_units(tiny_llama_dir, tmp_path):
    """max_epochs counts iterations, global_step optimiser steps; the default saves each end."""
    module = ppo_module(tiny_llama_dir)
    data = data_module()
    fit(tmp_path, module, data, max_epochs=2)
    assert module.trainer.current_epoch == 2
    assert module.trainer.global_step == 8  # 2 iterations x 2 epochs x 2 minibatches
    assert data.position == 16
    saved = {file.name for file in (tmp_path / "checkpoints").iterdir()}
    assert saved == {"epoch=1.ckpt", "last.ckpt"}


def test_python_users_get_a_class_from_the_package():
    import ppo_lightning

    assert ppo_lightning.PPOModule is PPOModule
