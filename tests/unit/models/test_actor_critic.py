"""Two networks or one trunk, and whose parameters are whose."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import OPTConfig, OPTForCausalLM

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ActorCritic,
    build_actor_critic,
    load_causal_lm,
    policy_logprobs,
)
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import WIDE

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])


def networks_of(folder: Path, lora: LoraConfig | None = None, **critic) -> ActorCritic:
    return build_actor_critic(
        PolicyConfig(path=str(folder), lora=lora), CriticConfig(head_init="normal", **critic)
    )


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def count_passes(module: torch.nn.Module, *, inside: bool = False) -> list[int]:
    """Note every pass through the first layer, or through a part of it."""
    passes: list[int] = []
    layer = layers_of(module)[0]
    counted = next(layer.children()) if inside else layer
    counted.register_forward_hook(lambda *_: passes.append(1))
    return passes


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_a_shared_trunk_is_passed_once_for_policy_and_values(family_dir: Path, lora):
    networks = networks_of(family_dir, lora, kind="shared")
    passes = count_passes(networks.actor)
    output = networks(BATCH, temperature=1.0)
    assert len(passes) == 1
    # The values are the head's on the trunk's last state, as transformers shows it.
    inputs = torch.tensor([[5, 9, 11, 20, 13, 17, 2]])
    hidden = networks.causal_lm(input_ids=inputs, output_hidden_states=True).hidden_states[-1]
    expected = networks.value_head(hidden)[0, :, 0]
    assert_close(output.values[0], expected[2:6], rtol=0, atol=1e-5)
    assert_close(output.final_values[0], expected[6], rtol=0, atol=1e-5)


def value_gradients(networks: ActorCritic, scale: float) -> dict[str, torch.Tensor]:
    networks.trunk_grad_scale = scale
    networks.zero_grad()
    networks(BATCH, temperature=1.0).values.square().sum().backward()
    return {n: p.grad for n, p in networks.named_parameters() if p.grad is not None}


def test_trunk_grad_scale_scales_exactly_the_value_gradient_into_the_trunk(family_dir: Path):
    networks = networks_of(family_dir, kind="shared")
    values = networks(BATCH, temperature=1.0).values
    full = value_gradients(networks, 1.0)
    quarter = value_gradients(networks, 0.25)
    assert any(full[name].any() for name in full if name.startswith("actor."))
    for name, gradient in full.items():
        factor = 1.0 if name.startswith("value_head") else 0.25  # a power of two: exact
        assert torch.equal(quarter[name], gradient * factor), name
    assert set(value_gradients(networks, 0.0)) == {"value_head.weight"}
    assert torch.equal(networks(BATCH, temperature=1.0).values, values)


def test_trunk_grad_scale_leaves_the_policy_gradient_alone(family_dir: Path):
    networks = networks_of(family_dir, kind="shared")
    gradients = []
    for scale in (1.0, 0.25):
        networks.trunk_grad_scale = scale
        networks.zero_grad()
        networks(BATCH, temperature=1.0).logprobs.sum().backward()
        gradients.append([p.grad.clone() for p in networks.actor.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_shared_critic_is_built_as_configured(tiny_model_dir: Path, dtype: str):
    networks = build_actor_critic(
        PolicyConfig(path=str(tiny_model_dir), dtype=dtype),
        CriticConfig(kind="shared", trunk_grad_scale=0.5),
    )
    assert networks.trunk_grad_scale == 0.5
    # One dtype for all that a strategy may shard together.
    assert {p.dtype for p in networks.parameters()} == {getattr(torch, dtype)}


def test_adapters_and_head_on_a_bfloat16_base_are_float32(family_dir: Path):
    networks = build_actor_critic(
        PolicyConfig(path=str(family_dir), dtype="bfloat16", lora=LoraConfig(rank=2)),
        CriticConfig(kind="shared"),
    )
    dtypes = {p.requires_grad: set() for p in networks.parameters()}
    for p in networks.parameters():
        dtypes[p.requires_grad].add(p.dtype)
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}
    output = networks(BATCH, temperature=1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    assert all(p.grad.dtype == torch.float32 for p in networks.parameters() if p.requires_grad)


@pytest.mark.parametrize("setting", ["policy", "critic_model"])
def test_float16_is_refused(tiny_llama_dir: Path, setting: str):
    dtypes = {"policy": "float32", "critic_model": None} | {setting: "float16"}
    policy = PolicyConfig(path=str(tiny_llama_dir), dtype=dtypes["policy"], lora=LoraConfig())
    with pytest.raises(ModelError, match=rf"`{setting}\.dtype: float16`"):
        build_actor_critic(policy, CriticConfig(dtype=dtypes["critic_model"]))


def test_the_head_reads_what_the_output_layer_reads(tmp_path: Path):
    # OPT may narrow the state before its output layer; the trunk's own width would not fit.
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        init_std=WIDE,
        dropout=0.1,
    )
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    shared, separate = (networks_of(tmp_path, kind=kind) for kind in ("shared", "separate"))
    assert shared.value_head.weight.shape == separate.critic.head.weight.shape == (1, 16)
    separate.critic.head.weight = shared.value_head.weight
    assert_close(
        separate(BATCH, temperature=1.0).values,
        shared(BATCH, temperature=1.0).values,
        rtol=0,
        atol=1e-5,
    )


def test_a_separate_critic_has_weights_of_its_own(family_dir: Path):
    networks = networks_of(family_dir)
    actor, critic = set(networks.actor_parameters()), set(networks.critic_parameters())
    assert actor
    assert critic
    assert not actor & critic
    assert actor | critic == set(networks.parameters())
    networks(BATCH, temperature=1.0).values.sum().backward()
    assert all(p.grad is None for p in actor)
    networks.zero_grad()
    networks(BATCH, temperature=1.0).logprobs.sum().backward()
    assert all(p.grad is None for p in critic)


def test_a_shared_critic_owns_its_head_and_the_actor_the_trunk(family_dir: Path):
    networks = networks_of(family_dir, kind="shared")
    assert list(networks.critic_parameters()) == [networks.value_head.weight]
    assert len(list(networks.actor_parameters())) == len(list(networks.actor.parameters()))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_only_adapters_of_the_actor_train_with_lora(family_dir: Path, kind: str):
    networks = networks_of(family_dir, LoraConfig(rank=2), kind=kind)
    trainable = {n for n, p in networks.actor.named_parameters() if p.requires_grad}
    assert trainable
    assert all(".lora_" in name for name in trainable)
    assert len(list(networks.actor_parameters())) == len(trainable)
    output = networks(BATCH, temperature=1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    assert {n for n, p in networks.actor.named_parameters() if p.grad is not None} == trainable


def test_only_what_was_asked_for_is_computed(tiny_model_dir: Path):
    networks = networks_of(tiny_model_dir)
    actor_passes, critic_passes = count_passes(networks.actor), count_passes(networks.critic)
    policy = networks(BATCH, temperature=1.0, values=False, entropy=False)
    assert (len(actor_passes), len(critic_passes)) == (1, 0)
    assert policy.values is policy.entropy is policy.final_values is policy.logits is None
    values = networks(BATCH, temperature=1.0, policy=False, final_values=False)
    assert (len(actor_passes), len(critic_passes)) == (1, 1)
    assert values.logprobs.isnan().all()  # not asked for: use must show
    both = networks(BATCH, temperature=1.0)
    assert_close(policy.logprobs, both.logprobs, rtol=0, atol=1e-5)
    assert_close(values.values, both.values, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="nothing was asked for"):
        networks(BATCH, temperature=1.0, policy=False, values=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t44_scoring_for_the_buffer_and_for_the_update_agree_bitwise(family_dir: Path, dtype: str):
    networks = build_actor_critic(
        PolicyConfig(path=str(family_dir), dtype=dtype), CriticConfig(head_init="normal")
    )
    with torch.no_grad():
        old = networks(BATCH, temperature=0.9)
        bare = policy_logprobs(networks.actor, BATCH, temperature=0.9)
    new = networks(BATCH, temperature=0.9, final_values=False, entropy_grad=False)
    assert torch.equal(new.logprobs, old.logprobs)  # every ratio is 1 before the first update
    assert torch.equal(bare.logprobs, old.logprobs)
    assert torch.equal(new.entropy, old.entropy)


def test_values_alone_from_a_shared_trunk(tiny_model_dir: Path):
    networks = networks_of(tiny_model_dir, kind="shared")
    alone = networks(BATCH, temperature=1.0, policy=False)
    assert alone.logprobs.isnan().all()
    assert torch.equal(alone.values, networks(BATCH, temperature=1.0).values)


def test_entropy_without_gradient_has_the_same_numbers(tiny_model_dir: Path):
    networks = networks_of(tiny_model_dir)
    logged = networks(BATCH, temperature=0.7, entropy_grad=False)
    trained = networks(BATCH, temperature=0.7)
    assert torch.equal(logged.entropy, trained.entropy)
    assert trained.entropy.requires_grad
    assert not logged.entropy.requires_grad


def test_either_a_critic_or_a_head_must_be_given(tiny_llama_dir: Path):
    actor = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    with pytest.raises(ValueError, match="either `critic` or `value_head`"):
        ActorCritic(actor)


def test_no_graph_survives_a_forward_pass(tiny_model_dir: Path):
    networks = networks_of(tiny_model_dir, kind="shared")
    head = networks.causal_lm.get_output_embeddings()
    with torch.no_grad():
        networks(BATCH, temperature=1.0)
    assert not head._forward_pre_hooks  # a hook left behind would keep tensors alive


def test_t21_gradient_checkpointing_changes_no_number(family_dir: Path):
    results = []
    for on in (False, True):
        networks = build_actor_critic(
            PolicyConfig(path=str(family_dir), gradient_checkpointing=on),
            CriticConfig(gradient_checkpointing=on),
        )
        passes = [count_passes(part, inside=True) for part in (networks.actor, networks.critic)]
        output = networks(BATCH, temperature=1.0)
        (output.logprobs.sum() + (output.values - 1).square().sum()).backward()
        assert [len(p) for p in passes] == ([2, 2] if on else [1, 1])  # once more in the backward
        assert networks.causal_lm.config.use_cache
        results.append([output.logprobs, *(p.grad for p in networks.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
