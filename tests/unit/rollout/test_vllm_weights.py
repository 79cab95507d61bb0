"""Which weights a vLLM answers with: those in hand, whatever happened since the last rollout."""

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import PolicyConfig, ReferenceConfig
from ppo_lightning.errors import ConfigError, ModelError, RolloutError
from ppo_lightning.models import ReferencePolicy
from ppo_lightning.rollout import NativeEngine, VLLMEngine
from tests.helpers import vllm_double
from tests.helpers.vllm_asking import as_trained, ask, change, loaded, same, with_adapter


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Every vLLM that was started."""
    return vllm_double.install(monkeypatch)


def test_greedy_it_says_what_the_native_engine_says_before_and_after_updates(
    tiny_model_dir, started
):
    engine, model = VLLMEngine(), loaded(tiny_model_dir)
    for version in range(3):
        rollout = ask(engine, model, version=version, greedy=True)
        same(rollout, ask(NativeEngine(), model, version=version, greedy=True))
        assert rollout.policy_version == version
        change(model)
    (llm,) = started
    assert len(llm.loads) == len(set(llm.loads)) == 3  # a folder read twice may be remembered
    assert llm.version.startswith("2.")


def test_weights_that_did_not_change_are_not_sent_again(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model, version=4)
    ask(engine, model, version=4)
    assert len(started[0].loads) == 1


@pytest.mark.parametrize("sign", ["version", "write"])
def test_each_sign_of_a_change_sends_the_weights(sign, tiny_llama_dir, started):
    """Held-out answers have no version, and a write past autograd leaves no mark."""
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model, version=4)
    weight = model.lm_head.weight
    if sign == "write":
        with torch.no_grad():
            weight.neg_()
    else:
        weight.data.neg_()
    as_trained(ask(engine, model, version=4 if sign == "write" else 5), model)
    assert len(started[0].loads) == 2


def test_prompts_read_with_old_weights_are_read_again(tiny_llama_dir):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model, [[5, 6, 7]])
    change(model)
    as_trained(ask(engine, model, [[5, 6, 7]], version=1), model)


def test_tied_weights_are_written_once_also_in_another_dtype(tiny_gpt2_dir, started):
    model = loaded(tiny_gpt2_dir)
    ask(VLLMEngine(dtype="bfloat16"), model)
    assert "transformer.wte.weight" in started[0].names
    assert "lm_head.weight" not in started[0].names
    held = started[0].model
    assert held.lm_head.weight is held.transformer.wte.weight
    assert held.lm_head.weight.dtype == torch.bfloat16
    assert_close(held.lm_head.weight, model.lm_head.weight.bfloat16(), rtol=0, atol=0)
    assert model.lm_head.weight.dtype == torch.float32


def test_the_dtype_is_that_of_the_forward_pass(tiny_llama_dir, started):
    model = loaded(tiny_llama_dir)
    with torch.autocast("cpu", torch.bfloat16):
        ask(VLLMEngine(), model)
    ask(VLLMEngine(), model)
    assert [llm.options["dtype"] for llm in started] == ["bfloat16", "float32"]
    with pytest.raises(ConfigError, match=r"`dtype` of the engine: .* torch\.float64"):
        ask(VLLMEngine(), model.double())


def test_nothing_is_left_where_weights_were_written(tiny_llama_dir, tmp_path):
    engine, model = VLLMEngine(weights_folder=str(tmp_path / "new")), loaded(tiny_llama_dir)
    for version in range(2):
        ask(engine, model, version=version)
        assert list((tmp_path / "new").rglob("config.json"))
        assert not list(tmp_path.rglob("*.safetensors"))


def test_a_place_without_room_is_named(tiny_llama_dir, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ppo_lightning.rollout.engines.vllm_weights.save_model", full)
    with pytest.raises(RolloutError, match=r"cannot be written .*No space left.*`weights_folder`"):
        ask(VLLMEngine(), loaded(tiny_llama_dir))


def test_other_weights_are_refused_before_vllm_takes_half_of_them(
    tiny_llama_dir, tiny_gpt2_dir, started
):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .* given a GPT2LMHeadModel without"):
        ask(engine, loaded(tiny_gpt2_dir))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(50, 32))
    with pytest.raises(ModelError, match=r"`lm_head\.weight` is \[50, 32\], not \[\d+, 32\]"):
        ask(engine, model, version=1)
    turned = loaded(tiny_llama_dir)
    turned.config.rope_parameters["rope_theta"] = 7.0
    with pytest.raises(ModelError, match=r"entry of the config `rope_parameters` is .*7\.0"):
        ask(engine, turned)
    assert len(started[0].loads) == 1


def test_a_reference_of_its_own_is_answered_for_with_its_own_weights(tiny_llama_dir, started):
    engine, model, reference = VLLMEngine(), loaded(tiny_llama_dir), loaded(tiny_llama_dir)
    change(model)
    for asked in (model, reference.requires_grad_(False), model):
        as_trained(ask(engine, asked), asked)
    assert len(started[0].loads) == 3


# -------------------------------------------------------------------------- adapters


def test_of_a_policy_with_an_adapter_only_that_travels(tiny_llama_dir, started):
    engine, model = VLLMEngine(), with_adapter(tiny_llama_dir)
    for version in range(3):
        rollout = ask(engine, model, version=version)
        as_trained(rollout, model)
        change(model)
    (llm,) = started
    assert len(llm.loads) == 1
    assert len(llm.adapter_loads) == len(set(llm.adapter_loads)) == 3
    assert llm.options["max_lora_rank"] == 8  # there is none of 3


def test_an_unchanged_adapter_is_not_sent_again(tiny_llama_dir, started):
    engine, model = VLLMEngine(), with_adapter(tiny_llama_dir)
    ask(engine, model)
    ask(engine, model)
    assert len(started[0].adapter_loads) == 1


def test_with_its_adapter_off_the_policy_is_its_reference(tiny_llama_dir, started):
    """Validation asks in turn: the base stays, and requests say whose they are."""
    engine, model = VLLMEngine(), with_adapter(tiny_llama_dir)
    engine.check(model)
    reference = ReferencePolicy(model, adapter_off=True)
    for version in range(2):
        with reference.causal_lm() as base:
            as_trained(ask(engine, base), base)
        as_trained(ask(engine, model, version=version), model)
    assert len(started[0].loads) == 1


def test_a_refreshed_reference_is_merged(tiny_llama_dir):
    engine, model = VLLMEngine(), with_adapter(tiny_llama_dir)
    reference = ReferencePolicy.build(
        ReferenceConfig(), PolicyConfig(path=str(tiny_llama_dir)), model
    )
    reference.refresh(model)
    change(model)
    as_trained(ask(engine, model), model)
    with reference.causal_lm() as base:
        as_trained(ask(engine, base), base)
    as_trained(ask(engine, model), model)


def test_a_family_without_adapters_is_sent_merged_weights_when_asked(tiny_gpt2_dir, started):
    model = with_adapter(tiny_gpt2_dir, dtype=torch.float16)
    with pytest.raises(RolloutError, match=r"could not start: .*GPT2LMHeadModel does not support"):
        ask(VLLMEngine(), model)
    engine = VLLMEngine(merge_adapter=True)
    for version in range(2):
        as_trained(ask(engine, model, version=version), model)
        change(model)
    assert "enable_lora" not in started[0].options
    assert len(started[0].loads) == 2


def test_in_float32_an_adapter_is_merged(tiny_llama_dir, started):
    engine, model = VLLMEngine(), with_adapter(tiny_llama_dir, dtype=torch.float32)
    for version in range(2):
        as_trained(ask(engine, model, version=version), model)
        change(model)
    assert "enable_lora" not in started[0].options
    assert len(started[0].loads) == 2


def test_an_adapter_of_too_high_a_rank_is_refused(tiny_llama_dir):
    model = with_adapter(tiny_llama_dir, rank=513, trained=False)
    with pytest.raises(ConfigError, match=r"`lora\.rank` 513: .* 512 at most"):
        ask(VLLMEngine(), model)


# -------------------------------------------------------------------------- sleep


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_asleep_between_rollouts_it_wakes_with_the_right_weights(
    level, lora, tiny_llama_dir, started
):
    engine = VLLMEngine(sleep_level=level)
    model = with_adapter(tiny_llama_dir) if lora else loaded(tiny_llama_dir)
    for version in (0, 0, 1):
        if version:
            change(model)
        as_trained(ask(engine, model, version=version), model)
        assert started[0].asleep
    assert set(started[0].sleeps) == {level}


def test_awake_it_stays_without_a_level(tiny_llama_dir, started):
    ask(VLLMEngine(), loaded(tiny_llama_dir))
    assert not started[0].sleeps
    assert not started[0].options["enable_sleep_mode"]
