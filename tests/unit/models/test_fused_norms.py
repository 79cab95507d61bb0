"""Norms with a backward pass of their own: which are replaced, and that it shows nowhere else."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.testing import assert_close
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.models import build_actor_critic, load_causal_lm
from ppo_lightning.models.fused import FusedNorm, fuse_layers, rms_norm
from tests.helpers.gradients import distance, gradients_of

SMALL = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,  # 0.3 makes 1e-6 of the rounding of one norm
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
FAMILIES = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), 5),
    "qwen2": (lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)), 5),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS)), 9),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**SMALL)), 5),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **HEADS)), 0),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=70, n_embd=32, n_layer=2, n_head=4)), 0),
}
EPS = 1e-6


def is_fused(module):
    return isinstance(module, FusedNorm)


def fused(norm):
    fuse_layers(norm)
    return norm


def llama_norm(size=16):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(size, EPS)
    nn.init.normal_(norm.weight)
    return norm


def both_ways(folder, **settings):
    """Networks with norms of ours and with the family's."""
    for switch in (True, False):
        torch.manual_seed(0)
        policy = PolicyConfig(path=str(folder), fused_layers=switch, **settings)
        yield build_actor_critic(policy, CriticConfig(kind="shared", head_init="normal"))


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """A folder, and how many norms of its model can be replaced."""
    make, count = FAMILIES[request.param]
    torch.manual_seed(0)
    model = make()
    for name, weight in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.normal_(weight, 1.0, 0.3)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", count


def test_a_family_keeps_its_numbers_and_gradients(family):
    folder, count = family
    ours, theirs = both_ways(folder)
    assert sum(is_fused(module) for module in ours.modules()) == count
    assert not any(is_fused(module) for module in theirs.modules())
    (found, found_grads), (expected, expected_grads) = gradients_of(ours), gradients_of(theirs)
    for name in ("logprobs", "values", "entropy"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert found_grads.keys() == expected_grads.keys()
    assert distance(found_grads, expected_grads) <= 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_and_checkpointing_keep_theirs(tiny_llama_dir, checkpointing):
    settings = {"lora": LoraConfig(rank=4), "gradient_checkpointing": checkpointing}
    (_, found), (_, expected) = map(gradients_of, both_ways(tiny_llama_dir, **settings))
    assert found.keys() == expected.keys()
    assert distance(found, expected) <= 1e-6


def test_nothing_of_it_is_saved(tiny_llama_dir, tmp_path):
    for switch in (True, False):
        policy = PolicyConfig(path=str(tiny_llama_dir), fused_layers=switch)
        load_causal_lm(policy).save_pretrained(tmp_path / str(switch))
    ours, theirs = (sorted((tmp_path / str(switch)).iterdir()) for switch in (True, False))
    assert [file.name for file in ours] == [file.name for file in theirs]
    for ours_file, theirs_file in zip(ours, theirs, strict=True):
        assert ours_file.read_bytes() == theirs_file.read_bytes()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_of_the_same_kind_and_shares_nothing(copied):
    norm = fused(llama_norm())
    twin = copied(norm)
    assert type(twin) is type(norm)
    assert isinstance(twin, LlamaRMSNorm)
    assert repr(twin) == repr(llama_norm())
    x = torch.randn(3, 16)
    assert torch.equal(twin(x), norm(x))
    nn.init.zeros_(twin.weight)
    assert norm(x).abs().min() > 0


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 4, 16), (0, 16)])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_torch_for_what_is_trained(shape, wanted):
    random = torch.Generator().manual_seed(0)
    grad = torch.randn(shape, generator=random)
    found, expected = [], []
    for norm, grads in ((lambda x, w: rms_norm(x, w, EPS), found),
                        (lambda x, w: torch_rms_norm(x, (16,), w, EPS), expected)):  # fmt: skip
        random.manual_seed(1)
        inputs = [torch.randn(size, generator=random) for size in (shape, (16,))]
        trained = [x.requires_grad_() for x, is_trained in zip(inputs, wanted, strict=True)
                   if is_trained]  # fmt: skip
        output = norm(*inputs)
        grads += [output.detach(), *torch.autograd.grad(output, trained, grad)]
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_transposed_input_is_read_as_it_lies():
    x, weight = torch.randn(4, 3, 16).transpose(0, 1).requires_grad_(), torch.randn(16)
    found, expected = rms_norm(x, weight, EPS), torch_rms_norm(x, (16,), weight, EPS)
    assert_close(found, expected)
    grads = [
        torch.autograd.grad(y, x, torch.ones(()).expand(3, 4, 16))[0] for y in (found, expected)
    ]
    assert_close(*grads)


def test_mixed_precision_rounds_nothing_in_the_backward_pass():
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    grad, found = torch.randn(5, 16), []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), grad))
    for ours, exact in zip(*found, strict=True):
        assert torch.equal(ours, exact)


def test_without_gradients_nothing_is_kept_and_twice_is_refused():
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(16)
    with torch.no_grad():
        quiet = rms_norm(x, weight, EPS)
    assert quiet.grad_fn is None
    kept = rms_norm(x, weight, EPS)
    assert torch.equal(quiet, kept)
    (grad,) = torch.autograd.grad(kept.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("family_norm", [LlamaRMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize("of_input", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_weight", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_the_familys(family_norm, of_input, of_weight):
    torch.manual_seed(0)
    x = torch.randn(5, 16).to(of_input)
    norms = [family_norm(16, EPS), fused(family_norm(16, EPS))]
    assert is_fused(norms[1])
    found = [norm.to(of_weight)(x) for norm in norms]
    assert found[0].dtype == found[1].dtype
    assert torch.equal(*found)


def test_a_compiler_is_given_the_familys_code():
    written = []

    def backend(graph, _):
        written.append(graph.code)
        return graph

    norm, x = fused(llama_norm()), torch.randn(3, 16)
    found = torch.compile(norm, backend=backend, fullgraph=True)(x)
    assert_close(found, norm(x))
    assert "pow" in written[0]  # ours has a square


class OtherRMSNorm(LlamaRMSNorm):
    """One that a family might have."""


class CenteredRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return torch_rms_norm(x, x.shape[-1:], 1 + self.weight, EPS)


class OuterEpsRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + EPS)


class NoEpsRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return torch_rms_norm(x, x.shape[-1:], self.weight, 1e-12)


class DetachedRMSNorm(OtherRMSNorm):
    def forward(self, x):
        length = x.detach().square().mean(-1, keepdim=True)
        return self.weight * x * (length + EPS).rsqrt()


class GroupedRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return torch_rms_norm(x.unflatten(-1, (2, -1)), (8,), None, EPS).flatten(-2) * self.weight


class GatedRMSNorm(OtherRMSNorm):
    def forward(self, x, gate):
        return super().forward(x) * gate


class PairRMSNorm(OtherRMSNorm):
    def forward(self, x):
        return super().forward(x), x


class BiasedRMSNorm(OtherRMSNorm):
    def __init__(self, *args):
        super().__init__(*args)
        self.bias = nn.Parameter(torch.zeros(16))


class LlamaNorm(LlamaRMSNorm):
    """Of a name that promises nothing."""


OTHERS = [
    CenteredRMSNorm,
    OuterEpsRMSNorm,
    NoEpsRMSNorm,
    DetachedRMSNorm,
    GroupedRMSNorm,
    GatedRMSNorm,
    PairRMSNorm,
    BiasedRMSNorm,
    LlamaNorm,
]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_plain_norm_is_left(kind):
    assert not is_fused(fused(kind(16, EPS)))
    assert is_fused(fused(OtherRMSNorm(16, EPS)))


def test_a_second_argument_goes_to_the_family():
    class OptionRMSNorm(OtherRMSNorm):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    norm, x = fused(OptionRMSNorm(16, EPS)), torch.randn(3, 16)
    assert is_fused(norm)
    for found in (norm(x, 2.0), norm(x, scale=2.0), norm(x=2 * x, scale=2.0)):
        assert_close(found, 2 * norm(x))


def test_a_model_without_weights_is_tried_too_and_a_second_time_changes_nothing():
    with torch.device("meta"):
        norm = LlamaRMSNorm(16, EPS)
    kind = type(fused(norm))
    assert is_fused(norm)
    assert norm.weight.is_meta
    assert type(fused(norm)) is kind


def test_trying_draws_no_random_number_of_the_runs():
    norm, before = llama_norm(), torch.get_rng_state()
    fuse_layers(norm)
    assert torch.equal(torch.get_rng_state(), before)
