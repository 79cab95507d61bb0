"""Adapters on a base in eight or four bits: what trains, what is kept, what is exported."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.testing import assert_close

from ppo_lightning.configs import BackboneConfig, CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ActorCritic,
    build_actor_critic,
    load_causal_lm,
    load_tokenizer,
    merged_copy,
    policy_logprobs,
    save_model,
)
from ppo_lightning.models.adapters import attach_lora, quiet_peft
from ppo_lightning.models.loading import load_scorer
from ppo_lightning.models.precision import (
    Int8Linear,
    NF4Linear,
    QuantisedLinear,
    quantise_linears,
)
from ppo_lightning.rollout.engines.native import _copy_in
from tests.helpers.quantised import is_quantised
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_llama

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = ["int8", "nf4"]

# Of the paper's appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
       -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
       0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip


@pytest.fixture(autouse=True)
def _with_package(request):
    if "nf4" in request.node.name:
        pytest.importorskip("bitsandbytes")


def layer_of(kind, rows=24, columns=40, bias=True, dtype=torch.float32, device="cpu"):
    torch.manual_seed(1)
    plain = nn.Linear(columns, rows, bias=bias).to(device, dtype)
    return {"int8": Int8Linear, "nf4": NF4Linear}[kind](plain.weight, plain.bias), plain


def written_out(layer):
    """Weights of a quantised layer, as one tensor."""
    return layer.dense(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(16, 64), (5, 14)])
def test_nf4_takes_the_nearest_level_of_each_block(shape, device):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    found = NF4Linear(weight.to(device), None).dense(torch.float32).cpu().flatten()
    levels = torch.tensor(NF4)
    for start in range(0, weight.numel(), 64):
        block = weight.flatten()[start : start + 64]
        scaled = block / block.abs().max()
        nearest = levels[(scaled[:, None] - levels).abs().argmin(1)] * block.abs().max()
        assert_close(found[start : start + 64], nearest, rtol=1e-6, atol=1e-7)


def test_nf4_takes_an_eighth_of_float32_and_a_scale_for_64():
    layer, plain = layer_of("nf4", rows=64, columns=128, bias=False)
    kept = sum(p.nbytes for p in layer.parameters())
    assert kept == plain.weight.nbytes / 8 + plain.weight.numel() / 64 * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_those_of_the_layer_written_out(kind, bias, dtype, device):
    layer, plain = layer_of(kind, bias=bias, dtype=dtype, device=device)
    with torch.no_grad():
        plain.weight.copy_(written_out(layer))
    plain.requires_grad_(False)
    x = torch.randn(2, 5, 40, device=device).to(dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = layer(ours), plain(theirs)
    grad = torch.randn(found.shape, device=device).to(dtype)
    found.backward(grad)
    expected.backward(grad)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    assert found.dtype == dtype
    assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_as_large_as_the_weights_is_kept_for_the_backward_pass(kind):
    layer, _ = layer_of(kind)
    sizes = []
    x = torch.randn(3, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        layer(x).sum().backward()
    assert max(sizes, default=0) <= layer.out_features
    assert x.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_it_computes_as_a_linear_layer_does(kind):
    layer, _ = layer_of(kind)
    x = torch.randn(3, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert_close(x.grad, written_out(layer).sum(0).expand(3, -1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_converts_a_model_leaves_the_scales_alone(kind):
    layer, _ = layer_of(kind, bias=False)
    expected = written_out(layer)
    assert torch.equal(written_out(copy.deepcopy(layer).to(torch.bfloat16)), expected)
    assert torch.equal(written_out(_copy_in(torch.bfloat16, nn.Sequential(layer))[0]), expected)


def test_without_the_package_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"`quantization: nf4` needs .*ppo-lightning\[qlora\]"):
        NF4Linear(torch.zeros(2, 2), None)


def test_settings_that_do_not_fit_are_refused():
    message = "`quantization: nf4` is for frozen weights: set `lora`, .* or leave it out"
    with pytest.raises(ValueError, match=message):
        PolicyConfig(path="x", quantization="nf4")
    with pytest.raises(ValueError, match="`compile` does not go with `quantization: int8`"):
        PolicyConfig(path="x", lora=LoraConfig(), quantization="int8", compile=True)
    with pytest.raises(ValueError, match=r"`quantization: int8` is for policies; .* leave it out"):
        BackboneConfig(path="x", lora=LoraConfig(), quantization="int8")


def quantised(folder: Path, kind, *, dtype="float32", trained=True, **lora) -> ActorCritic:
    policy = PolicyConfig(
        path=str(folder), lora=LoraConfig(rank=2, **lora), quantization=kind, dtype=dtype
    )
    networks = build_actor_critic(policy, CriticConfig(kind="shared"))
    if trained:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in networks.actor_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return networks


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return policy_logprobs(model, BATCH, temperature=1.0).logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_on_a_quantised_base(family_dir: Path, kind, dtype):
    networks = quantised(family_dir, kind, dtype=dtype)
    layers = [m for m in networks.modules() if isinstance(m, QuantisedLinear)]
    trained = dict(networks.actor.named_parameters())
    trained = {name: p for name, p in trained.items() if p.requires_grad}
    assert layers
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * len(layers)  # every quantised layer has an adapter
    output = networks(BATCH, temperature=1.0)
    (output.logprobs.sum() + output.values.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_near_the_one_with_all_its_bits(tiny_llama_dir: Path, kind):
    exact = logprobs(load_causal_lm(PolicyConfig(path=str(tiny_llama_dir))))
    found = logprobs(quantised(tiny_llama_dir, kind, trained=False).actor)
    error = float((found - exact).abs().max())
    assert 1e-5 < error < {"int8": 0.2, "nf4": 2.0}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_merged_into_the_original_weights(family_dir: Path, tmp_path: Path, kind):
    actor = quantised(family_dir, kind, target_modules="all-linear").actor
    before = {name: p.detach().clone() for name, p in actor.named_parameters()}
    plain = build_actor_critic(
        PolicyConfig(path=str(family_dir), lora=LoraConfig(rank=2)), CriticConfig(kind="shared")
    ).actor
    weights = dict(actor.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if weight.requires_grad:
                weight.copy_(weights[name])
    expected, found = merged_copy(plain).state_dict(), merged_copy(actor).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(p, before[name]) for name, p in actor.named_parameters())

    save_model(actor, load_tokenizer(str(family_dir)), tmp_path / "out")
    saved = load_causal_lm(PolicyConfig(path=str(tmp_path / "out")))
    assert not is_quantised(saved)
    assert_close(logprobs(saved), logprobs(plain), rtol=1e-4, atol=1e-4)


def test_what_was_added_to_the_folders_settings_is_exported(tiny_llama_dir: Path, tmp_path: Path):
    from ppo_lightning.models import add_end_id, settings_of

    actor = quantised(tiny_llama_dir, "int8").actor
    add_end_id(actor.get_base_model(), 17)
    save_model(actor, None, tmp_path / "out")
    saved = load_causal_lm(PolicyConfig(path=str(tmp_path / "out")))
    assert 17 in settings_of(saved).generation.eos_token_id


def test_weights_that_have_changed_meanwhile_are_not_merged_into(tmp_path: Path):
    folder = build_llama(tmp_path / "model")
    actor = quantised(folder, "int8").actor
    other = load_causal_lm(PolicyConfig(path=str(folder)))
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(2)
    other.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"holds other weights than when they were quantised"):
        merged_copy(actor)


def test_a_folder_with_an_adapter_is_merged_before_it_is_quantised(
    tiny_llama_dir: Path, tmp_path: Path
):
    with quiet_peft():
        model = attach_lora(
            load_causal_lm(PolicyConfig(path=str(tiny_llama_dir))), LoraConfig(rank=2)
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.fill_(0.1)
    model.peft_config["default"].base_model_name_or_path = str(tiny_llama_dir)
    model.save_pretrained(tmp_path / "adapter")
    assert isinstance(model, PeftModel)
    fine = load_causal_lm(PolicyConfig(path=str(tmp_path / "adapter")))
    actor = quantised(tmp_path / "adapter", "int8", trained=False).actor
    found = merged_copy(actor).state_dict()
    assert all(torch.equal(found[name], w) for name, w in fine.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_and_fused_norms_read_it_as_the_padded_grid_does(tiny_llama_dir, kind):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2), quantization=kind)
    slow = replace(policy, padding_free=False, fused_layers=False)
    found, expected = (
        build_actor_critic(p, CriticConfig(kind="shared")) for p in (policy, slow)
    )  # fmt: skip
    assert found.packs(BATCH)
    assert not expected.packs(BATCH)
    assert_close(logprobs(found.actor), logprobs(expected.actor), rtol=1e-4, atol=1e-4)


def test_scorers_are_left_as_they_are(tiny_llama_dir):
    assert not is_quantised(load_scorer(BackboneConfig(path=str(tiny_llama_dir))))


def test_weights_without_contents_need_no_package_and_take_as_much(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = nn.Module()
    model.base_model = nn.Sequential(nn.Linear(40, 24, bias=False, device="meta"))
    assert quantise_linears(model, "nf4") == 1
    shapes = {name: tuple(p.shape) for name, p in model.base_model[0].named_parameters()}
    assert shapes == {"weight": (480, 1), "scale": (15,)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_of_another_dtype_shares_the_weights_in_few_bits(tiny_llama_dir, kind):
    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=2), quantization=kind)
    model = build_actor_critic(policy, CriticConfig(kind="shared")).actor
    copied = dict(_copy_in(torch.bfloat16, model).named_parameters())
    small = [name for name, weight in model.named_parameters() if not weight.is_floating_point()]
    assert small
    for name, weight in model.named_parameters():
        assert (copied[name].data_ptr() == weight.data_ptr()) is (name in small)
