"""Gates that keep two tensors: which are replaced, and that it shows nowhere else."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, silu
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Config, Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import build_actor_critic, load_causal_lm, load_value_network
from ppo_lightning.models.fused import FusedGate, gated, recompute_gates
from tests.helpers.gradients import distance, gradients_of

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


def llama_gate(kind=LlamaMLP, **settings):
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES, **settings))


def fused(layer):
    recompute_gates(layer)
    return layer


def both(dtype=torch.float32, shape=(3, 5, 12)):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_and_gradients_are_bit_by_bit_those_of_two_operations(dtype):
    gate, up, grad = both(dtype)
    found, expected = gated(gate, up), silu(gate) * up
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(y, (gate, up), grad) for y in (found, expected))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_inputs_and_gradients_may_lie_in_any_order():
    gate, up, grad = (x.transpose(0, 1) for x in both())
    found, expected = (
        torch.autograd.grad(y, (gate, up), grad) for y in (gated(gate, up), silu(gate) * up)
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    empty = torch.zeros(0, 12, requires_grad=True)
    assert gated(empty, empty).shape == (0, 12)


def test_of_a_gate_two_tensors_are_kept_where_autograd_keeps_three():
    def kept(function):
        found, (gate, up, _) = [], both()
        with saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            function(gate * 1, up * 1)
        return len({x.data_ptr() for x in found})

    assert (kept(gated), kept(lambda gate, up: silu(gate) * up)) == (2, 3)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_product_is_let_go(mixed):
    kept, x = [], torch.randn(3, 5, 8, requires_grad=True)
    for layer in (fused(llama_gate()), llama_gate()):
        layer.down_proj.register_forward_pre_hook(
            lambda _, args: kept.append(StorageWeakRef(args[0].untyped_storage()))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y = layer(x)
        assert kept[-1].expired() is isinstance(layer, FusedGate)
        y.sum().backward()
    assert len(kept) == 2


def test_without_gradients_nothing_is_kept_and_twice_is_refused():
    gate, up, _ = both()
    with torch.no_grad():
        quiet = gated(gate, up)
    assert quiet.grad_fn is None
    assert torch.equal(quiet, gated(gate, up))
    (grad,) = torch.autograd.grad(gated(gate, up).square().sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_networks_keep_their_numbers_and_gradients(tiny_llama_dir, kind, lora, mixed):
    found = []
    for what in ("gates", False, True):
        torch.manual_seed(0)
        policy = PolicyConfig(path=str(tiny_llama_dir), gradient_checkpointing=what, lora=lora)
        own = what if kind == "separate" else False
        critic = CriticConfig(kind=kind, head_init="normal", gradient_checkpointing=own)
        networks = build_actor_critic(policy, critic)
        gates = [module for module in networks.modules() if isinstance(module, FusedGate)]
        assert len(gates) == (2 * (1 + (kind == "separate")) if what == "gates" else 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            found.append(gradients_of(networks))
    (ours, our_grads), *others = found
    for theirs, their_grads in others:
        assert torch.equal(ours.logprobs, theirs.logprobs)
        assert torch.equal(ours.values, theirs.values)
        assert distance(our_grads, their_grads) <= 1e-6


def test_a_family_without_such_gates_is_refused(tiny_gpt2_dir):
    with pytest.raises(ModelError, match=r"set `policy.gradient_checkpointing` to true or false"):
        load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir), gradient_checkpointing="gates"))
    critic = CriticConfig(gradient_checkpointing="gates")
    with pytest.raises(ModelError, match=r"set `critic_model.gradient_checkpointing` to"):
        load_value_network(critic, PolicyConfig(path=str(tiny_gpt2_dir)))


@pytest.mark.parametrize("config", [partial(PolicyConfig, path="model"), CriticConfig])
def test_what_a_compiler_would_not_do_and_what_is_misspelt_are_refused(config):
    with pytest.raises(ValueError, match="`gradient_checkpointing: gates` and `compile: true`"):
        config(gradient_checkpointing="gates", compile=True)
    with pytest.raises(ValueError, match=r"must be one of True, False, gates, got 'gate'"):
        config(gradient_checkpointing="gate")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_of_the_same_kind(copied):
    layer, x = fused(llama_gate()), torch.randn(3, 8)
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert isinstance(twin, LlamaMLP)
    assert repr(twin) == repr(llama_gate())
    assert torch.equal(twin(x), layer(x))


def test_layers_that_come_later_are_called():
    layer, x = fused(llama_gate()), torch.randn(3, 8)
    expected = layer(x)
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(layer, name, nn.Sequential(getattr(layer, name), nn.Identity()))
    assert torch.equal(layer(x), expected)
    layer.up_proj = layer.up_proj.append(nn.Dropout(1.0)).train()
    assert layer(x).abs().max() == 0


def test_halves_of_two_dtypes_are_promoted_as_ever():
    layer, x = fused(llama_gate()), torch.randn(3, 8)
    expected = layer(x)
    layer.up_proj = layer.up_proj.double()
    layer.up_proj.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    layer.down_proj = layer.down_proj.double()
    torch.testing.assert_close(layer(x), expected.double(), rtol=1e-5, atol=1e-7)


class OtherMLP(LlamaMLP):
    """One that a family might have."""


class BoundedMLP(OtherMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))


class ShiftedMLP(OtherMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


class DropoutMLP(OtherMLP):
    def forward(self, x):
        return dropout(super().forward(x), 0.5, self.training)


class SwappedMLP(OtherMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class ScaledMLP(OtherMLP):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(12))


class NormedMLP(OtherMLP):
    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(12)


class PairMLP(OtherMLP):
    def forward(self, x, residual):
        return super().forward(x) + residual


class LlamaGate(LlamaMLP):
    """Of a name that promises nothing."""


@pytest.mark.parametrize(
    "kind",
    [BoundedMLP, ShiftedMLP, DropoutMLP, SwappedMLP, ScaledMLP, NormedMLP, PairMLP, LlamaGate],
)
def test_what_is_no_plain_gate_is_left(kind):
    assert not isinstance(fused(llama_gate(kind)), FusedGate)
    assert isinstance(fused(llama_gate(OtherMLP, mlp_bias=True)), FusedGate)


def test_other_functions_are_left():
    assert not isinstance(fused(llama_gate(hidden_act="gelu")), FusedGate)
    assert not isinstance(fused(Gemma2MLP(Gemma2Config(**SIZES))), FusedGate)


def test_trying_changes_nothing():
    before = torch.get_rng_state()
    with torch.device("meta"):
        layer = llama_gate(DropoutMLP)
        other = llama_gate()
    weights = [*layer.parameters(), *other.parameters()]
    assert isinstance(fused(other), FusedGate)
    recompute_gates(layer)
    assert weights == [*layer.parameters(), *other.parameters()]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    recompute_gates(layer)
    assert torch.equal(torch.get_rng_state(), before)
