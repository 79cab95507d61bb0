"""Families whose length nothing limits, and whose cache is no list of keys: a run of each."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from ppo_lightning.configs import GuardConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import decoding
from ppo_lightning.rollout import GenerateEngine, NativeEngine
from tests.helpers.runs import data_module, fit, ppo_module
from tests.helpers.tiny_models import WIDE, word_tokenizer

TOKENIZER = word_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": WIDE,
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
STATES = {"mamba_d_state": 4, "mamba_dt_rank": 4}
FAMILIES = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(n_layer=2, n_head=2, **SIZES)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(alibi=True, num_attention_heads=2, **SIZES)),
    "mamba": lambda: MambaForCausalLM(MambaConfig(state_size=4, **SIZES)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=8, **SIZES)
    ),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            attn_layer_period=2, attn_layer_offset=1, num_experts=2, **HEADS, **STATES, **SIZES
        )
    ),
}


def folder_of(family, tmp_path):
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(tmp_path / family)
    TOKENIZER.save_pretrained(tmp_path / family)
    return tmp_path / family


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_from_what_it_trains(family, tmp_path):
    seen = fit(tmp_path, ppo_module(folder_of(family, tmp_path)), data_module(), max_epochs=1)
    assert seen.stats[0].sampler_mismatch < 1e-5
    assert seen.stats[0].steps_taken > 0


@pytest.mark.parametrize("family", ["bloom", "falcon", "mamba", "mamba2"])
def test_where_nothing_limits_no_model_is_the_shortest(family, tmp_path):
    module = ppo_module(folder_of(family, tmp_path))
    assert module.max_prompt_tokens is None
    assert module.shortest_model is None


def test_t09_a_cache_that_is_read_another_way_is_refused(tmp_path, monkeypatch):
    """A mask as wide as the cache is taken for a longer input by a Mamba, without a sign."""
    monkeypatch.setattr(decoding, "_STATES_ONLY", set())
    module = ppo_module(folder_of("mamba", tmp_path))
    with pytest.raises(ModelError, match=r"a MambaForCausalLM says something else .*GenerateEng"):
        module.configure_model()
    module.engine = GenerateEngine()
    seen = fit(tmp_path, module, data_module(), max_epochs=1)
    assert seen.stats[0].sampler_mismatch < 1e-5


def test_a_family_whose_decoding_fails_is_refused_by_name(tiny_llama_dir, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such state")

    monkeypatch.setattr(decoding, "decode_step", fail)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be decoded .*no such state"):
        ppo_module(tiny_llama_dir).configure_model()


def test_a_mismatch_that_no_check_foresaw_is_told_in_the_run(tiny_llama_dir, tmp_path):
    class Stale(NativeEngine):
        def generate(self, *args, **options):
            rollout = super().generate(*args, **options)
            return replace(rollout, sampler_logprobs=rollout.sampler_logprobs - 0.1)

    module = ppo_module(
        tiny_llama_dir, engine=Stale(), guards=GuardConfig(self_check="warn", advice="off")
    )
    with pytest.warns(UserWarning, match=r"differ from the trainer's by 0\.1 nats") as told:
        fit(tmp_path, module, data_module(), max_epochs=2)
    assert len([w for w in told if "sampler_mismatch" in str(w.message)]) == 1
