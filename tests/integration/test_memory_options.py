"""Runs with a quantised base, a reference kept otherwise, or offloaded states."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.callbacks import RefreshReference
from ppo_lightning.checkpointing import load_actor, read_models
from ppo_lightning.configs import LoraConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import CheckpointError, ModelError
from ppo_lightning.models import load_causal_lm, merged_copy
from ppo_lightning.rollout import NativeEngine
from tests.helpers.quantised import is_quantised
from tests.helpers.runs import data_module, fit, parameters, ppo_module

VARIANTS = {
    "int8": {"policy": {"lora": LoraConfig(rank=4), "quantization": "int8"}},
    "nf4 shared": {
        "policy": {"lora": LoraConfig(rank=4), "quantization": "nf4"},
        "critic_model": {"kind": "shared"},
    },
    "offloaded": {"optimizer": OptimizerConfig(offload=True)},
}
OTHERS = {"plain": {}, "unquantised": {"policy": {"lora": LoraConfig(rank=4)}}}


@pytest.fixture(autouse=True)
def _with_package(request):
    if "nf4" in request.node.name:
        pytest.importorskip("bitsandbytes")


def run(folder, model_dir, variant, *, ckpt=None, epochs=2, **settings):
    module = ppo_module(model_dir, **(VARIANTS | OTHERS)[variant], **settings)
    saving = ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    recorder = fit(
        folder, module, data_module(), ckpt=ckpt, max_epochs=epochs, callbacks=[saving]
    )  # fmt: skip
    return module, recorder


def require_equal(module, other):
    found, expected = parameters(module), parameters(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_one_that_never_stopped(tiny_llama_dir, tmp_path, variant):
    whole, recorded = run(tmp_path / "whole", tiny_llama_dir, variant)
    file = tmp_path / "whole/checkpoints/epoch=0.ckpt"
    pl.seed_everything(99, verbose=False)
    resumed, _ = run(tmp_path / "again", tiny_llama_dir, variant, ckpt=file)
    require_equal(resumed, whole)
    assert recorded.stats[0].kl_ref == pytest.approx(0, abs=1e-5)  # the base is the reference

    saved = torch.load(file, weights_only=True)["state_dict"]
    assert all(weight.is_floating_point() for weight in saved.values())
    if variant != "offloaded":
        assert all("lora_" in name for name in saved if name.startswith("networks.actor."))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_offloaded_states_give_the_same_run_and_may_be_taken_up_on_resume(tiny_llama_dir, tmp_path):
    plain, _ = run(tmp_path / "plain", tiny_llama_dir, "plain")
    offloaded, _ = run(tmp_path / "offloaded", tiny_llama_dir, "offloaded")
    require_equal(offloaded, plain)
    file = tmp_path / "plain/checkpoints/epoch=0.ckpt"
    resumed, _ = run(tmp_path / "again", tiny_llama_dir, "offloaded", ckpt=file)
    require_equal(resumed, plain)


def test_the_checkpoint_of_a_quantised_run_exports_the_original_with_its_adapters(
    tiny_llama_dir, tmp_path
):
    module, _ = run(tmp_path, tiny_llama_dir, "int8", epochs=1)
    file = tmp_path / "checkpoints/epoch=0.ckpt"
    actor = load_actor(read_models(file))
    assert is_quantised(actor)
    expected = merged_copy(module.networks.actor).state_dict()
    found = merged_copy(actor).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    module.export(tmp_path / "out")
    saved = load_causal_lm(PolicyConfig(path=str(tmp_path / "out")))
    assert not is_quantised(saved)
    assert all(torch.equal(w, expected[name]) for name, w in saved.state_dict().items())


def test_another_quantisation_is_another_base(tiny_llama_dir, tmp_path):
    run(tmp_path / "first", tiny_llama_dir, "int8", epochs=1)
    file = tmp_path / "first/checkpoints/epoch=0.ckpt"
    with pytest.raises(CheckpointError, match="frozen base weights differ"):
        run(tmp_path / "again", tiny_llama_dir, "unquantised", ckpt=file)


def test_a_quantised_policy_is_sampled_in_another_dtype(tiny_llama_dir, tmp_path):
    _, recorder = run(
        tmp_path, tiny_llama_dir, "int8", epochs=1, engine=NativeEngine(dtype="bfloat16")
    )
    assert recorder.stats[0].kl_ref == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    "reference",
    [ReferenceConfig(quantization="int8"), ReferenceConfig(device="cpu", dtype="bfloat16")],
)
def test_a_reference_of_its_own_is_near_the_actor_at_the_start(tiny_llama_dir, tmp_path, reference):
    module = ppo_module(tiny_llama_dir, reference=reference)
    recorder = fit(tmp_path, module, data_module(), max_epochs=1)
    assert 0 < abs(recorder.stats[0].kl_ref) < 0.2


def test_a_quantised_reference_cannot_become_the_actor(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir, reference=ReferenceConfig(quantization="int8"))
    with pytest.raises(ModelError, match=r"leave out `reference\.quantization`"):
        fit(tmp_path, module, data_module(), callbacks=[RefreshReference(every_n_iterations=1)])


def test_the_reference_becomes_an_actor_on_a_quantised_base(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir, **VARIANTS["int8"])
    callbacks = [RefreshReference(every_n_iterations=1)]
    recorder = fit(tmp_path, module, data_module(), max_epochs=2, callbacks=callbacks)
    assert recorder.stats[1].kl_ref == pytest.approx(0, abs=1e-5)
    with module.reference.causal_lm() as model:
        own = {id(weight) for weight in module.networks.actor.parameters()}
        shared = [w for w in model.parameters() if not w.is_floating_point()]
        assert shared
        assert all(id(weight) in own for weight in shared)
