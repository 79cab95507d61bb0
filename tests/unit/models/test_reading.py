"""A model's way of reading: what is found out, and that packed rows say what padded ones say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.functional import products
from ppo_lightning.models import (
    Reading,
    build_actor_critic,
    keep_reading,
    load_causal_lm,
    policy_logprobs,
    reading_of,
)
from ppo_lightning.models.attention import ATTENTION
from tests.helpers.gradients import distance, gradients_of
from tests.helpers.sequences import sequences_of

PROMPTS = [[5, 9, 11], [12, 7, 30, 8, 21, 14, 6, 25, 10], [3]]
RESPONSES = [[20, 13, 17, 2], [9, 22], [4, 5, 6, 7, 8, 9]]
BATCH = sequences_of(PROMPTS, RESPONSES, extra=1)
SHARED = sequences_of([*PROMPTS, *PROMPTS[:2]], [*RESPONSES, [30, 9, 5], [7]], extra=1)

SMALL = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
EXPERTS = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
SPARSE = {
    "num_key_value_heads": 4,
    "index_topk": 20,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

LATENT = {k: v for k, v in SPARSE.items() if not k.startswith("index")} | {"v_head_dim": 12}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def written(folder: Path, model) -> str:
    torch.manual_seed(0)
    model.save_pretrained(folder / "model")
    return str(folder / "model")


def largest_of(grads):
    return max(float(grad.abs().max()) for grad in grads.values())


@pytest.mark.parametrize("kind", ["separate", "shared"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [BATCH, SHARED], ids=["apart", "shared prompts"])
def test_packed_rows_give_the_numbers_and_gradients_of_padded_ones(family_dir, kind, dtype, batch):
    critic = CriticConfig(kind=kind, head_init="normal")
    found = []
    for packed in (True, False):
        torch.manual_seed(0)
        policy = PolicyConfig(path=str(family_dir), dtype=dtype, padding_free=packed)
        networks = build_actor_critic(policy, critic)
        assert networks.packs(batch) == packed
        found.append(gradients_of(networks, batch))
    (ours, our_grads), (theirs, their_grads) = found
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    for name in ("logprobs", "values", "entropy", "final_values"):
        assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)
    assert our_grads.keys() == their_grads.keys()
    # A family may compute its norms in float32 also where all else is float64, and then it matters
    # whether gradients of a shared prompt are added up before or behind one.
    exact = 1e-13 if batch is BATCH else 1e-7
    assert distance(our_grads, their_grads) <= (1e-6 if dtype == "float32" else exact)


def test_adapters_and_checkpointing_change_nothing_about_it(tiny_llama_dir):
    found = []
    for packed, checkpointing in ((True, False), (True, True), (False, False)):
        torch.manual_seed(0)
        policy = PolicyConfig(
            path=str(tiny_llama_dir),
            lora=LoraConfig(rank=4),
            padding_free=packed,
            gradient_checkpointing=checkpointing,
        )
        networks = build_actor_critic(policy, CriticConfig(kind="shared", head_init="normal"))
        found.append(gradients_of(networks, SHARED)[1])
    for grads in found[:2]:
        assert grads.keys() == found[2].keys()
        for name, grad in grads.items():
            atol = 1e-6 * largest_of(found[2])
            assert_close(grad, found[2][name], rtol=0, atol=atol, msg=name)


def test_a_row_sees_nothing_of_its_neighbours(family_dir):
    model = load_causal_lm(PolicyConfig(path=str(family_dir)))
    assert reading_of(model).packed
    together = policy_logprobs(model, BATCH, temperature=1.0).logprobs
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = policy_logprobs(model, sequences_of([prompt], [response]), temperature=1.0)
        assert_close(together[row, : len(response)], alone.logprobs[0], rtol=0, atol=1e-5)


def test_a_sliding_window_holds_in_packed_rows(tmp_path):
    config = MistralConfig(**SMALL, sliding_window=4)
    folder = written(tmp_path, MistralForCausalLM(config))
    models = [load_causal_lm(PolicyConfig(path=folder, padding_free=p)) for p in (True, False)]
    reading = reading_of(models[0])
    assert reading.packed
    assert reading.longest == 4
    assert not reading.takes_packed(5)
    packed, padded = (policy_logprobs(m, BATCH, temperature=1.0).logprobs for m in models)
    assert torch.equal(packed, padded)  # too long: read the plain way
    networks = build_actor_critic(PolicyConfig(path=folder), CriticConfig())
    assert not networks.packs(BATCH)  # so padding counts
    assert networks.packs(sequences_of([[5, 9]], [[3]]))
    keep_reading(models[0], replace(reading, longest=None))
    forced = policy_logprobs(models[0], BATCH, temperature=1.0).logprobs
    assert_close(forced, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=70, hidden_size=32, num_hidden_layers=1)),
         Reading(fused_head=True)),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)), Reading()),
        (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=2.0)),
         Reading(packed=True, slots=True)),
        (lambda: LlamaForCausalLM(LlamaConfig(**(SMALL | GROUPED))),
         Reading(packed=True, slots=True, fused_head=True)),
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=DYNAMIC)),
         Reading(packed=True, fused_head=True)),
        (lambda: Llama4ForCausalLM(Llama4TextConfig(**SMALL, **EXPERTS)), Reading(fused_head=True)),
        (lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**(SMALL | LATENT))),
         Reading(packed=True, slots=True, fused_head=True)),
        (lambda: DeepseekV32ForCausalLM(DeepseekV32Config(**(SMALL | SPARSE))),
         Reading(fused_head=True)),
    ],
    ids=["mamba", "gemma2", "granite", "grouped", "dynamic rope", "llama4", "latent",
         "sparse attention"],
)  # fmt: skip
def test_families_that_need_the_plain_way_get_it(tmp_path, model, expected):
    folder = written(tmp_path, model())
    loaded = load_causal_lm(PolicyConfig(path=folder))
    assert reading_of(loaded) == expected
    padded = load_causal_lm(PolicyConfig(path=folder, padding_free=False))
    ours, theirs = (policy_logprobs(m, BATCH, temperature=1.0).logprobs for m in (loaded, padded))
    assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (loaded.config._attn_implementation == ATTENTION) == expected.packed


def test_eager_attention_and_the_switch_are_obeyed(tiny_llama_dir):
    for settings in ({"attn_implementation": "eager"}, {"padding_free": False}):
        model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir), **settings))
        assert reading_of(model) == Reading(fused_head=True)
        assert model.config._attn_implementation != ATTENTION


def test_a_wrapped_output_layer_is_called_and_left_as_it_was(tiny_llama_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    head, called = model.lm_head, []
    plain = head.forward

    def wrapper(hidden):
        called.append(hidden.shape)
        return plain(hidden)

    head.forward = wrapper
    policy_logprobs(model, BATCH, temperature=1.0)
    assert called == [(1, 12, 32)]
    assert head.forward is wrapper


def test_the_folder_says_nothing_of_the_attention(tiny_llama_dir, tmp_path):
    model = load_causal_lm(PolicyConfig(path=str(tiny_llama_dir)))
    model.save_pretrained(tmp_path / "out")
    assert ATTENTION not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("batch", [BATCH, SHARED], ids=["apart", "shared prompts"])
def test_products_in_16_bits_come_in_round_sizes(tiny_llama_dir, batch, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    networks = build_actor_critic(PolicyConfig(path=str(tiny_llama_dir)), CriticConfig())
    sizes = set()
    for layer in networks.modules():
        if isinstance(layer, nn.Linear) and layer.out_features > 1:
            layer.register_forward_pre_hook(lambda _, args: sizes.add(args[0].shape[1]))
    exact, _ = gradients_of(networks, batch)
    assert any(size % 16 for size in sizes)
    sizes.clear()
    with torch.autocast("cpu", torch.bfloat16):
        coarse, _ = gradients_of(networks, batch)
    assert not any(size % 16 for size in sizes)
    assert_close(coarse.logprobs, exact.logprobs, rtol=0, atol=0.05)
