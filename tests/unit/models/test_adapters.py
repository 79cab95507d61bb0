"""LoRA: what trains, what is saved, and the way back to the weights below."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ReferencePolicy,
    adapter_disabled,
    build_actor_critic,
    is_adapted,
    load_causal_lm,
    load_tokenizer,
    merged_copy,
    policy_logprobs,
    save_model,
)
from ppo_lightning.models.adapters import quiet_peft
from tests.helpers.sequences import sequences_of

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])


def adapted(folder: Path, *, trained: bool = True, **lora):
    networks = build_actor_critic(
        PolicyConfig(path=str(folder), lora=LoraConfig(rank=2, **lora)), CriticConfig(kind="shared")
    )
    if trained:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in networks.actor_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return networks


def logprobs(model) -> torch.Tensor:
    with torch.no_grad():
        return policy_logprobs(model, BATCH, temperature=1.0).logprobs


def test_new_adapters_change_nothing(family_dir: Path):
    plain = load_causal_lm(PolicyConfig(path=str(family_dir)))
    networks = adapted(family_dir, trained=False)
    assert is_adapted(networks.actor)
    assert not is_adapted(plain)
    assert torch.equal(logprobs(networks.actor), logprobs(plain))


def test_every_linear_layer_but_the_head_gets_an_adapter(family_dir: Path):
    networks = adapted(family_dir)
    with_adapter = {
        n.split(".lora_A")[0].split(".")[-1] for n in networks.actor.state_dict() if ".lora_A" in n
    }
    assert len(with_adapter) >= 3
    assert "lm_head" not in with_adapter


def test_rank_scale_and_targets_are_obeyed(tiny_llama_dir: Path):
    networks = adapted(tiny_llama_dir, target_modules=["q_proj"], alpha=6.0)
    names = [n for n, p in networks.actor.named_parameters() if p.requires_grad]
    assert names
    assert all(".q_proj." in name for name in names)
    layer = networks.causal_lm.model.layers[0].self_attn.q_proj
    assert layer.scaling == {"default": 3.0}
    assert layer.lora_A["default"].weight.shape[0] == 2
    default = adapted(tiny_llama_dir).causal_lm.model.layers[0].self_attn.q_proj
    assert default.scaling == {"default": 2.0}


@pytest.mark.parametrize("targets", [["c_attn", "lm_head"], ["c_attn", "wte"], r".*(c_fc|head)"])
def test_tied_ends_take_no_adapter(tiny_gpt2_dir: Path, targets):
    with pytest.raises(ModelError, match=r"`lora\.target_modules`.*(lm_head|wte).*tied"):
        adapted(tiny_gpt2_dir, target_modules=targets)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            ["q_proj", "k_porj"],
            r"no layer is called `k_porj`; did you mean `k_proj`\? There are: q_",
        ),
        (["nosuch"], r"no layer is called `nosuch`; There are: q_proj, k_proj, "),
        ("q_proj", r"called `q_proj`; .* such as `model\.layers\.0\.self_attn\.q_proj`; for last"),
        (["self_attn"], r"`lora\.target_modules` \['self_attn'\]: "),  # no layer, and PEFT says so
    ],
)
def test_names_that_no_layer_has_are_refused_with_those_there_are(tiny_llama_dir, targets, said):
    with pytest.raises(ModelError, match=said):
        adapted(tiny_llama_dir, target_modules=targets)


def test_an_output_layer_of_its_own_takes_one(tiny_llama_dir: Path):
    networks = adapted(tiny_llama_dir, target_modules=["lm_head"])
    embedding = networks.causal_lm.get_input_embeddings().weight.clone()
    merged = merged_copy(networks.actor)
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    assert_close(logprobs(merged), logprobs(networks.actor), rtol=0, atol=1e-4)


def test_reference_is_bitwise_the_actor_with_its_adapter_off(family_dir: Path):
    policy = PolicyConfig(path=str(family_dir), lora=LoraConfig(rank=2))
    networks = adapted(family_dir)
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    assert reference.adapter_off
    plain = logprobs(load_causal_lm(policy))
    theirs = reference.logprobs(BATCH, temperature=1.0).logprobs
    assert torch.equal(theirs, plain)
    assert not torch.equal(theirs, logprobs(networks.actor))


def test_t25_the_switch_is_undone_even_after_an_exception(family_dir: Path):
    networks = adapted(family_dir)
    before = logprobs(networks.actor)
    trainable = [p.requires_grad for p in networks.actor.parameters()]

    def use_and_fail() -> None:
        with adapter_disabled(networks.actor):
            assert not torch.equal(logprobs(networks.actor), before)
            raise RuntimeError("in mid-reference")

    with pytest.raises(RuntimeError, match="mid-reference"):
        use_and_fail()
    assert torch.equal(logprobs(networks.actor), before)
    assert [p.requires_grad for p in networks.actor.parameters()] == trainable


def test_t25_the_switch_leaves_frozen_adapters_frozen_and_nests(tiny_model_dir: Path):
    networks = adapted(tiny_model_dir)
    networks.actor.requires_grad_(False)  # as in value warm-up
    with adapter_disabled(networks.actor):
        with adapter_disabled(networks.actor):
            off = logprobs(networks.actor)
        assert torch.equal(logprobs(networks.actor), off)
    assert not any(p.requires_grad for p in networks.actor.parameters())
    assert not torch.equal(logprobs(networks.actor), off)


def test_t25_an_adapter_as_sft_model_is_merged_so_kl_starts_at_zero(
    family_dir: Path, tmp_path: Path
):
    targets = "all-linear"
    base = AutoModelForCausalLM.from_pretrained(family_dir)
    torch.manual_seed(1)
    with quiet_peft():
        sft = get_peft_model(
            base,
            PeftLora(
                r=2,
                target_modules=targets,
                init_lora_weights=False,
                lora_dropout=0.05,
                task_type="CAUSAL_LM",
                fan_in_fan_out="gpt2" in str(family_dir),
            ),
        )
    sft.save_pretrained(tmp_path / "sft")
    expected = logprobs(sft.eval())
    policy = PolicyConfig(path=str(tmp_path / "sft"), lora=LoraConfig(rank=2))
    networks = build_actor_critic(policy, CriticConfig())
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    ours = logprobs(networks.actor)
    assert_close(ours, expected, rtol=0, atol=1e-4)  # merging rounds
    assert not torch.allclose(ours, logprobs(load_causal_lm(PolicyConfig(path=str(family_dir)))))
    assert torch.equal(reference.logprobs(BATCH, temperature=1.0).logprobs, ours)
    # The folder of an adapter need not hold a tokenizer: its base does.
    assert len(load_tokenizer(str(tmp_path / "sft"))) == len(load_tokenizer(str(family_dir)))


def test_merged_copy_is_plain_equal_and_apart(family_dir: Path, tmp_path: Path):
    networks = adapted(family_dir)
    state = {k: v.clone() for k, v in networks.actor.state_dict().items()}
    before = logprobs(networks.actor)
    merged = merged_copy(networks.actor)
    assert not is_adapted(merged)
    assert not any("lora" in key for key in merged.state_dict())
    assert_close(logprobs(merged), before, rtol=0, atol=1e-4)
    assert torch.equal(logprobs(networks.actor), before)
    assert all(torch.equal(v, state[k]) for k, v in networks.actor.state_dict().items())
    with torch.no_grad():
        next(merged.parameters()).zero_()
    assert torch.equal(logprobs(networks.actor), before)
    with pytest.raises(ValueError, match="without an adapter"):
        merged_copy(merged)
    save_model(networks.actor, None, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_close(logprobs(plain), before, rtol=0, atol=1e-4)


def test_t55_state_keys_tell_adapters_from_the_frozen_base(family_dir: Path):
    networks = adapted(family_dir)
    trainable = {n for n, p in networks.named_parameters() if p.requires_grad}
    assert trainable == {n for n in networks.state_dict() if ".lora_" in n} | {"value_head.weight"}
    # A checkpoint of adapters alone brings a fresh model to the same place.
    fresh = adapted(family_dir, trained=False)
    kept = {k: v for k, v in networks.state_dict().items() if k in trainable}
    report = fresh.load_state_dict(kept, strict=False)
    assert set(report.missing_keys) == networks.state_dict().keys() - trainable
    assert torch.equal(logprobs(fresh.actor), logprobs(networks.actor))


LAST_OF_BLOCK = {"gpt2": "c_proj", "llama": "down_proj"}


@pytest.mark.parametrize("targets", ["all-linear", "names", r".*_proj"])
def test_adapters_on_the_last_blocks_end_the_backward_pass_there(tiny_model_dir: Path, targets):
    names = [LAST_OF_BLOCK[tiny_model_dir.name]] if targets == "names" else targets
    networks = adapted(tiny_model_dir, layers=1, target_modules=names)
    blocks = {
        part
        for name, weight in networks.actor.named_parameters()
        if weight.requires_grad
        for part in name.split(".")
        if part.isdigit()
    }
    assert blocks == {"1"}
    seen = []
    for name, module in networks.causal_lm.named_modules():
        if name.endswith((".0", ".1")):
            module.register_forward_hook(lambda m, a, out, name=name: seen.append(_needs_grad(out)))
    networks(BATCH, temperature=1.0).logprobs.sum().backward()
    assert seen == [False, True]


def _needs_grad(output) -> bool:
    return (output[0] if isinstance(output, tuple) else output).requires_grad


def test_adapters_on_all_blocks_by_number_are_those_without_a_number(tiny_model_dir: Path):
    def names(**lora):
        return set(dict(adapted(tiny_model_dir, trained=False, **lora).actor.named_parameters()))

    assert names(layers=2) == names()


def test_more_blocks_than_the_model_has_or_none_of_the_names_in_them(tiny_llama_dir: Path):
    with pytest.raises(ValueError, match="at most 2"):
        adapted(tiny_llama_dir, layers=3)
    with pytest.raises(ValueError, match=r"'lm_head'.*last 1 blocks"):
        adapted(tiny_llama_dir, layers=1, target_modules=["lm_head"])
    with pytest.raises(ValueError, match="`layers` must be at least 1"):
        LoraConfig(layers=0)
