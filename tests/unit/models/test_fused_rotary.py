"""Queries and keys turned in fewer operations: where, and that it shows nowhere else."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Olmo2Config, Phi3Config, PhiConfig, Qwen3Config
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb
from transformers.models.olmo2 import modeling_olmo2

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.models import build_actor_critic
from ppo_lightning.models.fused import FusedRotary, fuse_layers, rotary, turned
from tests.helpers.gradients import distance, gradients_of

SMALL = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
FAMILIES = {
    "phi": PhiConfig(**SMALL, partial_rotary_factor=0.5),
    "phi3": Phi3Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
}


def drawn(*shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(dtype)


def inputs(of_states=torch.float32, of_angles=torch.float32):
    query, key = (drawn(2, 5, n, 8, seed=n, dtype=of_states).transpose(1, 2) for n in (4, 2))
    cos, sin = (drawn(2, 5, 8, seed=n, dtype=of_angles) for n in (7, 8))
    return query.requires_grad_(), key.requires_grad_(), cos, sin


def with_gradients(turn, given):
    found = turn(*given)
    grads = torch.autograd.grad(found, given[:2], [drawn(*x.shape).to(x.dtype) for x in found])
    return *found, *grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_turn_and_its_gradients_are_bit_by_bit_the_familys(dtype):
    given = inputs(dtype, dtype)
    for found, expected in zip(
        with_gradients(turned, given), with_gradients(apply_rotary_pos_emb, given), strict=True
    ):
        assert torch.equal(found, expected)


def test_without_gradients_nothing_is_kept_and_twice_is_refused():
    given = inputs()
    with torch.no_grad():
        quiet = turned(*given)
    kept = turned(*given)
    assert quiet[0].grad_fn is None
    assert all(torch.equal(*pair) for pair in zip(quiet, kept, strict=True))
    (grad,) = torch.autograd.grad(kept[0].square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("of_states", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_angles", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_the_familys(of_states, of_angles):
    given = inputs(of_states, of_angles)
    ours = with_gradients(lambda *x: rotary._turn(apply_rotary_pos_emb, *x), given)
    theirs = with_gradients(apply_rotary_pos_emb, given)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        # The family rounds gradients to the dtype of the states before it adds them up.
        bound = 1e-2 if torch.bfloat16 in (found.dtype, expected.dtype) else 1e-6
        assert_close(found, expected, rtol=bound, atol=bound)


def test_what_is_computed_in_sixteen_bits_is_left_to_the_family():
    given = inputs(torch.bfloat16, torch.bfloat16)
    found, expected = rotary._turn(apply_rotary_pos_emb, *given), apply_rotary_pos_emb(*given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_other_axes_and_trained_angles_are_left_to_the_family():
    query, key, cos, sin = inputs()
    rows = [x.transpose(1, 2) for x in (query, key)]
    found = rotary._turn(apply_rotary_pos_emb, *rows, cos, sin, unsqueeze_dim=2)
    assert torch.equal(found[0], apply_rotary_pos_emb(*rows, cos, sin, unsqueeze_dim=2)[0])
    cos.requires_grad_()
    found = rotary._turn(apply_rotary_pos_emb, query, key, cos, sin)
    (grad,) = torch.autograd.grad(found[0].sum(), cos)
    assert grad.abs().max() > 0


@pytest.fixture(params=FAMILIES)
def family_dir(request, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(tmp_path)
    return tmp_path


def test_a_family_keeps_its_numbers_and_gradients(family_dir):
    found = []
    for switch in (True, False):
        torch.manual_seed(0)
        policy = PolicyConfig(path=str(family_dir), fused_layers=switch)
        networks = build_actor_critic(policy, CriticConfig(kind="shared", head_init="normal"))
        replaced = [module for module in networks.modules() if isinstance(module, FusedRotary)]
        assert len(replaced) == (2 if switch else 0)
        found.append(gradients_of(networks))
    (ours, our_grads), (theirs, their_grads) = found
    assert torch.equal(ours.logprobs, theirs.logprobs)
    assert our_grads.keys() == their_grads.keys()
    assert distance(our_grads, their_grads) <= 1e-6


def attention(kind=LlamaAttention):
    torch.manual_seed(0)
    config = modeling_llama.LlamaConfig(**SMALL)
    config._attn_implementation = "sdpa"
    return kind(config, layer_idx=0)


def fused(layer):
    fuse_layers(layer)
    return layer


def called(layer, **options):
    cos, sin = drawn(1, 3, 8, seed=1), drawn(1, 3, 8, seed=2)
    return layer(drawn(1, 3, 32), (cos, sin), None, **options)[0]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_of_the_same_kind(copied):
    layer = fused(attention())
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert isinstance(twin, LlamaAttention)
    assert repr(twin) == repr(attention())
    assert torch.equal(called(twin), called(layer))


def test_nothing_changes_outside_of_the_layer():
    before = modeling_llama.apply_rotary_pos_emb
    layer, plain = fused(attention()), attention()
    assert isinstance(layer, FusedRotary)
    assert_close(called(layer), called(plain))
    assert modeling_llama.apply_rotary_pos_emb is before
    assert not isinstance(plain, FusedRotary)


def test_ours_is_called_unless_code_is_compiled(monkeypatch):
    layer, calls = fused(attention()), []
    monkeypatch.setattr(rotary, "turned", lambda *x: calls.append(1) or turned(*x))
    expected = called(layer)
    assert calls == [1]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_close(called(layer), expected)
    assert calls == [1]


def test_an_argument_by_its_older_name_is_not_lost():
    updated = []

    class Cache:
        def update(self, key, value, *_, **__):
            updated.append(key.shape)
            return key, value

    layer = fused(attention())
    is_its_own = "past_key_values" in rotary._arguments(LlamaAttention)
    with nullcontext() if is_its_own else pytest.warns(FutureWarning):
        called(layer, past_key_values=Cache())
    assert updated == [(1, 2, 3, 8)]


def test_a_family_that_casts_back_is_followed(tmp_path):
    """Angles are float32 beside states of 16 bits, and some leave the result in float32."""
    given = inputs(torch.bfloat16, torch.float32)
    for module in (modeling_olmo2, modeling_llama):
        found = rotary._turn(module.apply_rotary_pos_emb, *given)
        expected = module.apply_rotary_pos_emb(*given)
        assert [x.dtype for x in found] == [x.dtype for x in expected]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Olmo2Config(**SMALL)).save_pretrained(tmp_path)
    policy = PolicyConfig(path=str(tmp_path), dtype="bfloat16", lora=LoraConfig(rank=2))
    networks = build_actor_critic(policy, CriticConfig(kind="shared"))
    assert any(isinstance(module, FusedRotary) for module in networks.modules())
    output, _ = gradients_of(networks)
    assert output.logprobs.isfinite().all()


@pytest.mark.parametrize("module", [modeling_cohere, modeling_glm], ids=["cohere", "glm"])
def test_other_turns_are_left(module):
    assert not rotary._agrees(module.apply_rotary_pos_emb)
    assert rotary._agrees(modeling_gpt_neox.apply_rotary_pos_emb)


def test_layers_without_such_a_function_are_left():
    class OwnAttention(LlamaAttention):
        def forward(self, hidden_states, position_embeddings, attention_mask):
            return hidden_states, None

    assert not isinstance(fused(attention(OwnAttention)), FusedRotary)
    assert not isinstance(fused(torch.nn.Linear(2, 2)), FusedRotary)
