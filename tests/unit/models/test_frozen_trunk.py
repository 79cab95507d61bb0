"""Frozen blocks: their states are made once, and passes that begin behind them say the same."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.models import ReferencePolicy, build_actor_critic
from ppo_lightning.models.frozen_trunk import frozen_trunk_of, learn_frozen_trunk
from tests.helpers.gradients import gradients_of
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2, build_llama

# The third answers the first's prompt, and the second is read by itself.
BATCH = sequences_of(
    [[5, 9, 11], [12, 7, 30, 8, 21], [5, 9, 11]], [[20, 13, 17, 2], [9, 22], [3]], extra=1
)
GROUPS = [torch.tensor([2, 0]), torch.tensor([1])]
TOP = LoraConfig(rank=2, layers=1)
SMALL = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def networks_of(folder, *, kind="shared", **policy):
    torch.manual_seed(0)
    settings = PolicyConfig(**{"path": str(folder), "lora": TOP} | policy)
    networks = build_actor_critic(settings, CriticConfig(kind=kind, head_init="normal")).train()
    moved(networks)
    return networks


def moved(networks):
    """Adapters that do something."""
    with torch.no_grad():
        for parameter in networks.actor_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def blocks_of(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def counted(model):
    """Numbers of the blocks that run, as they do."""
    ran = []
    for number, block in enumerate(blocks_of(model)):
        plain = block.forward
        block.forward = lambda *a, _n=number, _f=plain, **k: ran.append(_n) or _f(*a, **k)
    return ran


def assert_alike(networks, rows=(0, 1, 2)):
    """Over rows that lie before the model otherwise than when their states were made."""
    known = networks.with_frozen_states(BATCH, GROUPS)
    picked = torch.tensor(rows)
    output, gradients = gradients_of(networks, known.select(picked).trimmed())
    expected, expected_gradients = gradients_of(networks, BATCH.select(picked).trimmed())
    for name in ("logprobs", "entropy", "values", "final_values"):
        assert_close(getattr(output, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        atol = 1e-5 * float(gradient.abs().max())
        assert_close(gradients[name], gradient, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.parametrize(
    "policy",
    [{}, {"padding_free": False}, {"gradient_checkpointing": True}],
    ids=["packed", "padded", "checkpointing"],
)
def test_passes_that_begin_behind_frozen_blocks_say_the_same(family_dir, kind, policy):
    networks = networks_of(family_dir, kind=kind, **policy)
    assert networks.has_frozen_trunk
    for rows in [(0, 1, 2), (1, 2), (0,)]:
        assert_alike(networks, rows=rows)


def test_under_autocast_states_are_what_the_pass_would_make(tiny_llama_dir):
    networks = networks_of(tiny_llama_dir)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        known = networks.with_frozen_states(BATCH, [torch.arange(3)])
        found, expected = (networks(s, temperature=1.0).logprobs for s in (known, BATCH))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_states_are_kept_in_the_dtype_that_they_have(tiny_llama_dir, dtype):
    networks = networks_of(tiny_llama_dir, dtype=dtype)
    known = networks.with_frozen_states(BATCH, GROUPS)
    assert known.trunk.states.dtype == getattr(torch, dtype)
    assert len(known.trunk.states) >= 3 + 4 + 1 + 5 + 2  # the shared prompt once
    with torch.no_grad():
        found, expected = (networks(s, temperature=1.0).logprobs for s in (known, BATCH))
    tolerance = 0.1 if dtype == "bfloat16" else 1e-12
    assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_each_block_runs_where_it_must_and_nowhere_else(tmp_path, build):
    layers = {"n_layer" if build is build_gpt2 else "num_hidden_layers": 4}
    policy = PolicyConfig(path=str(build(tmp_path / "m", **layers)), lora=TOP)
    networks = networks_of(policy.path)
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    expected = reference.logprobs(BATCH, temperature=1.0).logprobs
    ran = counted(networks.causal_lm)
    known = networks.with_frozen_states(BATCH, GROUPS)
    assert ran == [0, 1, 2, 0, 1, 2]
    ran.clear()
    gradients_of(networks, known)
    found = reference.logprobs(known, temperature=1.0).logprobs
    assert ran == [3, 3]
    assert_close(found, expected)
    ran.clear()
    gradients_of(networks, BATCH)
    assert ran == [0, 1, 2, 3]


def test_a_refreshed_reference_begins_there_too(tiny_llama_dir):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=TOP)
    networks = networks_of(policy.path)
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    reference.refresh(networks.actor)
    moved(networks)
    known = networks.with_frozen_states(BATCH, GROUPS)
    with reference.causal_lm() as model:
        ran = counted(model)
    found, expected = (reference.logprobs(s, temperature=1.0).logprobs for s in (known, BATCH))
    assert ran == [1, 0, 1]
    assert_close(found, expected)


def test_a_reference_of_its_own_and_a_critic_of_its_own_read_tokens(tiny_llama_dir, tmp_path):
    other = build_llama(tmp_path / "other", seed=5)
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=TOP)
    networks = networks_of(policy.path, kind="separate")
    reference = ReferencePolicy.build(ReferenceConfig(path=str(other)), policy, networks.actor)
    known = networks.with_frozen_states(BATCH, GROUPS)
    ran = counted(networks.critic.backbone)
    networks(known, temperature=1.0)
    assert ran == [0, 1]
    found, expected = (reference.logprobs(s, temperature=1.0).logprobs for s in (known, BATCH))
    assert torch.equal(found, expected)


def written(folder, model):
    torch.manual_seed(0)
    model().save_pretrained(folder)
    return folder


def test_a_window_and_blocks_that_return_more_than_states(tmp_path):
    config = MistralConfig(**SMALL, sliding_window=4)
    assert_alike(networks_of(written(tmp_path / "window", lambda: MistralForCausalLM(config))))
    bloom = BloomConfig(vocab_size=70, hidden_size=32, n_layer=3, n_head=2, initializer_range=0.3)
    networks = networks_of(written(tmp_path / "bloom", lambda: BloomForCausalLM(bloom)))
    assert frozen_trunk_of(networks.causal_lm).beside == 1
    assert_alike(networks)


def test_a_family_whose_last_blocks_look_into_the_first_runs_them_all(tmp_path):
    config = Gemma3nTextConfig(
        **SMALL,
        head_dim=8,
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=70,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0, 0.0],
        laurel_rank=4,
    )
    networks = networks_of(written(tmp_path / "m", lambda: Gemma3nForCausalLM(config)))
    assert not networks.has_frozen_trunk


# Where nothing is kept


@pytest.mark.parametrize(
    "policy",
    [
        {"lora": None},
        {"lora": LoraConfig(rank=2)},
        {"lora": LoraConfig(rank=2, layers=2)},
        {"cache_frozen_trunk": False},
    ],
    ids=["all weights", "all blocks", "all blocks by number", "switched off"],
)
def test_nothing_is_kept_where_the_first_block_is_trained_or_nobody_wants_it(
    tiny_model_dir, policy
):
    assert not networks_of(tiny_model_dir, **policy).has_frozen_trunk


def thawed_embedding(model):
    model.get_input_embeddings().weight.requires_grad_(True)  # with GPT-2 the output layer's too


def thawed_block(model):
    next(blocks_of(model)[0].parameters()).requires_grad_(True)


def noisy(model):
    blocks_of(model)[0].mlp.dropout.p = 0.5


def watched(model):
    next(blocks_of(model)[0].children()).register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [thawed_embedding, thawed_block, noisy, watched])
def test_what_is_no_constant_any_more_is_not_kept(tiny_gpt2_dir, change):
    networks = networks_of(tiny_gpt2_dir)
    assert networks.has_frozen_trunk
    change(networks.causal_lm)
    assert not networks.has_frozen_trunk


@pytest.mark.parametrize("change", [thawed_embedding, thawed_block, noisy])
def test_nor_is_what_never_was_one(tiny_gpt2_dir, change):
    model = networks_of(tiny_gpt2_dir).causal_lm
    change(model)
    assert learn_frozen_trunk(model) is None
    assert frozen_trunk_of(model) is None


def test_a_model_that_is_frozen_whole_begins_behind_its_last_block(tiny_model_dir):
    networks = networks_of(tiny_model_dir, lora=None)
    networks.actor.requires_grad_(False)
    assert learn_frozen_trunk(networks.causal_lm).depth == 2
    assert_alike_values(networks)


def assert_alike_values(networks):
    ran = counted(networks.causal_lm)
    known = networks.with_frozen_states(BATCH, GROUPS)
    ran.clear()
    found = networks(known, temperature=1.0)
    assert ran == []
    expected = networks(BATCH, temperature=1.0)
    assert_close(found.values, expected.values)
    assert_close(found.logprobs, expected.logprobs)


def test_an_error_inside_leaves_the_model_as_it_was(tiny_llama_dir):
    networks = networks_of(tiny_llama_dir)
    known = networks.with_frozen_states(BATCH, GROUPS)
    broken = replace(known, trunk=replace(known.trunk, states=known.trunk.states[:, :5]))
    with pytest.raises(RuntimeError):
        networks(broken, temperature=1.0)
    assert all("forward" not in vars(block) for block in blocks_of(networks.causal_lm))
    assert_alike(networks)


def test_no_rows_bring_no_states(tiny_llama_dir):
    none = BATCH.select(torch.arange(0))
    assert networks_of(tiny_llama_dir).with_frozen_states(none, []).trunk is None
