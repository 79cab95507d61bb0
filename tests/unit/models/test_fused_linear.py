"""Linear layers by ``functional.linear``: which are replaced, and that it shows nowhere else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.functional import products
from ppo_lightning.models import build_actor_critic, load_causal_lm
from ppo_lightning.models.fused import FusedConv1D, FusedLinear, family_of, fuse_layers, linear
from ppo_lightning.models.precision import QuantisedLinear, quantise_linears
from ppo_lightning.models.reading import reading_of
from tests.helpers.gradients import distance, gradients_of

LLAMA = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), FusedLinear, 15),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=70, n_embd=32, n_layer=2, n_head=4)),
        FusedConv1D,
        8,
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A folder, a class, and how many layers of its model are of it."""
    make, kind, count = FAMILIES[request.param]
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "model")
    return tmp_path / "model", kind, count


@pytest.fixture
def by_onednn(monkeypatch):
    """As on a processor where it is quicker, however small the product; how often it is asked."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    calls: list[int] = []
    original = products._onednn

    def counted(*parts):
        calls.append(1)
        return original(*parts)

    for place in (products, linear):
        monkeypatch.setattr(place, "onednn_is_quicker", lambda: True)
    monkeypatch.setattr(products, "LEAST_PRODUCTS", 1)
    monkeypatch.setattr(products, "works_in_halves", lambda: False)
    monkeypatch.setattr(products, "_onednn", counted)
    return calls


def networks(folder, *, switch=True, **settings):
    torch.manual_seed(0)
    policy = PolicyConfig(path=str(folder), fused_layers=switch, **settings)
    return build_actor_critic(policy, CriticConfig(kind="shared", head_init="normal"))


@pytest.mark.parametrize(
    "settings", [{}, {"lora": LoraConfig(rank=4)}, {"gradient_checkpointing": True}], ids=str
)
def test_a_family_keeps_its_numbers_and_gradients(family, monkeypatch, by_onednn, settings):
    folder, kind, count = family
    ours = networks(folder, **settings)
    assert sum(isinstance(module, kind) for module in ours.modules()) == count
    found, found_grads = gradients_of(ours)
    assert len(by_onednn) >= 2 * count  # forward, and for the layer before it
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    theirs = networks(folder, switch=False, **settings)
    assert not any(isinstance(module, kind) for module in theirs.modules())
    expected, expected_grads = gradients_of(theirs)
    for name in ("logprobs", "values", "entropy"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, equal_nan=True
        )
    assert found_grads.keys() == expected_grads.keys()
    assert distance(found_grads, expected_grads) <= 1e-6


def test_gates_that_are_made_again_keep_theirs(family, by_onednn):
    folder, kind, _ = family
    if kind is FusedConv1D:
        pytest.skip("GPT-2 has no gates")
    (_, found), (_, expected) = (
        gradients_of(networks(folder, switch=switch, gradient_checkpointing="gates"))
        for switch in (True, False)
    )
    assert distance(found, expected) <= 1e-6


@pytest.mark.parametrize("switch", [True, False])
def test_a_plain_head_is_still_known_as_one(family, by_onednn, switch):
    """Logits of the whole vocabulary would be made otherwise."""
    model = load_causal_lm(PolicyConfig(path=str(family[0]), fused_layers=switch))
    assert reading_of(model).fused_head
    assert reading_of(model).packed


def test_layers_that_are_replaced_can_be_quantised(family, by_onednn):
    folder, kind, count = family
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    quantised = quantise_linears(model, "int8")
    assert quantised == count - (kind is FusedLinear)  # the head stays
    assert sum(isinstance(module, QuantisedLinear) for module in model.modules()) == quantised


class Own(nn.Linear):
    """Does something else, maybe."""


def test_subclasses_are_left(by_onednn):
    model = nn.Sequential(nn.Linear(3, 2), Own(2, 2), Conv1D(2, 2))
    fuse_layers(model)
    assert [type(module).__mro__[1] for module in model] == [FusedLinear, nn.Linear, FusedConv1D]
    assert [family_of(module) for module in model] == [nn.Linear, Own, Conv1D]
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert family_of(model[0]) is type(model[0])


def test_nothing_is_replaced_where_nothing_is_gained(monkeypatch):
    monkeypatch.setattr(linear, "onednn_is_quicker", lambda: False)
    model = nn.Sequential(nn.Linear(3, 2))
    fuse_layers(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("plain", [nn.Linear(3, 2), Conv1D(2, 3)], ids=["Linear", "Conv1D"])
def test_a_copy_is_of_the_same_kind_and_shares_nothing(copied, plain, by_onednn):
    layer = copy.deepcopy(plain)
    fuse_layers(layer)
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert isinstance(twin, type(plain))
    assert repr(twin) == repr(plain)
    x = torch.randn(4, 3)
    assert torch.equal(twin(x), layer(x))
    nn.init.zeros_(twin.weight)
    assert layer(x).abs().min() > 0
