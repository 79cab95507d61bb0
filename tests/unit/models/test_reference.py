"""The frozen reference of a full run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    PolicyOutput,
    ReferencePolicy,
    build_actor_critic,
    load_causal_lm,
)
from tests.helpers.quantised import is_quantised
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_llama

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])


def test_a_full_reference_starts_equal_and_stays(family_dir: Path):
    policy = PolicyConfig(path=str(family_dir))
    networks = build_actor_critic(policy, CriticConfig())
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    start = networks(BATCH, temperature=0.9).logprobs
    theirs = reference.logprobs(BATCH, temperature=0.9)
    assert torch.equal(theirs.logprobs, start)  # KL to the reference is 0 at step 0
    assert not theirs.logprobs.requires_grad
    torch.optim.SGD(networks.actor_parameters(), lr=0.1).step()
    start.sum().backward()
    torch.optim.SGD(networks.actor_parameters(), lr=0.1).step()
    assert not torch.equal(networks(BATCH, temperature=0.9).logprobs, start)
    assert torch.equal(reference.logprobs(BATCH, temperature=0.9).logprobs, start)


def test_a_reference_built_late_is_still_the_start(tiny_model_dir: Path):
    # A resumed actor is no longer what it started from.
    policy = PolicyConfig(path=str(tiny_model_dir))
    networks = build_actor_critic(policy, CriticConfig())
    start = networks(BATCH, temperature=1.0).logprobs
    with torch.no_grad():
        next(networks.actor_parameters()).add_(1.0)
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    assert torch.equal(reference.logprobs(BATCH, temperature=1.0).logprobs, start)


def test_t55_the_holder_registers_nothing(tiny_model_dir: Path):
    policy = PolicyConfig(path=str(tiny_model_dir))

    class Owner(torch.nn.Module):
        pass

    owner = Owner()
    owner.networks = build_actor_critic(policy, CriticConfig())
    keys = set(owner.state_dict())
    owner.reference = ReferencePolicy.build(ReferenceConfig(), policy, owner.networks.actor)
    assert set(owner.state_dict()) == keys
    with owner.reference.causal_lm() as model:
        assert not any(p.requires_grad for p in model.parameters())
        assert not model.training
    assert owner.reference.to("cpu") is owner.reference


def test_path_and_dtype_make_a_second_model(tiny_llama_dir: Path, tmp_path: Path):
    other = build_llama(tmp_path / "other", seed=7)
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    nearer = ReferencePolicy.build(ReferenceConfig(path=str(other)), policy, actor)
    coarse = ReferencePolicy.build(ReferenceConfig(dtype="bfloat16"), policy, actor)
    own = ReferencePolicy.build(ReferenceConfig(dtype="float32"), policy, actor)
    assert [r.adapter_off for r in (nearer, coarse, own)] == [False, False, True]
    with coarse.causal_lm() as model:
        assert model.dtype == torch.bfloat16
    logprobs = [r.logprobs(BATCH, temperature=1.0).logprobs for r in (nearer, coarse, own)]
    assert not torch.allclose(logprobs[0], logprobs[2], atol=0.1)
    assert torch.allclose(logprobs[1], logprobs[2], atol=0.5)
    assert logprobs[1].dtype == torch.float32


def test_logits_come_on_request(tiny_model_dir: Path):
    policy = PolicyConfig(path=str(tiny_model_dir))
    actor = build_actor_critic(policy, CriticConfig()).actor
    reference = ReferencePolicy.build(ReferenceConfig(), policy, actor)
    assert reference.logprobs(BATCH, temperature=1.0).logits is None
    output = reference.logprobs(BATCH, temperature=1.0, logits=True)
    assert output.logits.shape == (2, 4, actor.config.vocab_size)


def test_no_graph_is_kept_even_where_peft_asks_for_one(tiny_model_dir: Path):
    # For checkpointing PEFT makes the embeddings' output require a gradient.
    policy = PolicyConfig(
        path=str(tiny_model_dir), lora=LoraConfig(rank=2), gradient_checkpointing=True
    )
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(), policy, actor)
    assert not reference.logprobs(BATCH, temperature=1.0).logprobs.requires_grad


def test_adapter_off_needs_an_adapter(tiny_model_dir: Path):
    actor = build_actor_critic(PolicyConfig(path=str(tiny_model_dir)), CriticConfig()).actor
    with pytest.raises(ValueError, match="needs a model with an adapter"):
        ReferencePolicy(actor, adapter_off=True)


def test_quantisation_and_device_make_a_second_model(tiny_llama_dir: Path):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    small = ReferencePolicy.build(ReferenceConfig(quantization="int8"), policy, actor)
    away = ReferencePolicy.build(ReferenceConfig(device="cpu"), policy, actor)
    assert [r.adapter_off for r in (small, away)] == [False, False]
    with small.causal_lm() as model:
        assert is_quantised(model)
    exact = away.logprobs(BATCH, temperature=1.0).logprobs
    found = small.logprobs(BATCH, temperature=1.0).logprobs
    assert 1e-5 < (found - exact).abs().max() < 0.2

    eight = replace(policy, quantization="int8")
    actor = build_actor_critic(eight, CriticConfig(kind="shared")).actor
    own = ReferencePolicy.build(ReferenceConfig(), eight, actor)
    assert own.adapter_off
    whole = ReferencePolicy.build(ReferenceConfig(dtype="bfloat16"), eight, actor)
    with whole.causal_lm() as model:  # a second copy keeps its bits unless it is asked otherwise
        assert not is_quantised(model)


def test_a_reference_stays_on_its_own_device(tiny_llama_dir: Path, monkeypatch):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    asked = []

    class Answer:
        def to(self, device):
            return f"moved to {device}"

    def score(model, sequences, **options):
        asked.append({t.device.type for t in (sequences.prompt_ids, sequences.response_mask)})
        return PolicyOutput(Answer())

    monkeypatch.setattr("ppo_lightning.models.reference.policy_logprobs", score)
    reference = ReferencePolicy(model, device=torch.device("meta"))  # stands for another device
    assert reference.to("cpu").device.type == "meta"
    assert reference.logprobs(BATCH, temperature=1.0).logprobs == "moved to cpu"
    assert asked == [{"meta"}]


@pytest.mark.gpu
def test_a_reference_on_the_cpu_answers_on_the_gpu(tiny_llama_dir: Path):
    policy = PolicyConfig(path=str(tiny_llama_dir))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(device="cpu"), policy, actor).to("cuda")
    expected = reference.logprobs(BATCH, temperature=1.0).logprobs
    found = reference.logprobs(BATCH.to("cuda"), temperature=1.0).logprobs
    assert found.is_cuda
    assert torch.equal(found.cpu(), expected)


def test_devices_that_are_not_there_are_refused(tiny_llama_dir: Path):
    with pytest.raises(ValueError, match=r"`device` must be auto, cpu, cuda or .* got 'tpu'"):
        ReferenceConfig(device="tpu")
    policy = PolicyConfig(path=str(tiny_llama_dir))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(device="cuda:99"), policy, actor)
    with pytest.raises(ModelError, match=r"`reference\.device: cuda:99`: this machine has \d+"):
        reference.to("cpu")


@pytest.mark.parametrize("family", ["tiny_llama_dir", "tiny_gpt2_dir"])
def test_a_quantised_copy_takes_no_weights_of_an_actor(family, request):
    policy = PolicyConfig(path=str(request.getfixturevalue(family)))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(quantization="int8"), policy, actor)
    for act in (reference.require_alike, reference.refresh, reference.require_pullable):
        with pytest.raises(ModelError, match=r"leave out `reference\.quantization`"):
            act(actor)


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"device": "cpu"}, {"dtype": "bfloat16"}], ids=str
)
def test_a_copy_of_its_own_takes_no_adapters(tiny_llama_dir, settings):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2))
    actor = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    reference = ReferencePolicy.build(ReferenceConfig(**settings), policy, actor)
    with pytest.raises(ModelError, match="a reference of its own cannot become an actor with"):
        reference.require_alike(actor)
    with pytest.raises(ModelError, match="leave out `path`, `dtype`, `quantization` and `device`"):
        reference.require_pullable(actor)
