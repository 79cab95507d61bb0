"""Engines: where responses end, what is drawn, and that nothing depends on the neighbours."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GenerationConfig

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.models import load_causal_lm, policy_logprobs
from ppo_lightning.rollout import (
    BatchedEngine,
    Decoded,
    GenerateEngine,
    NativeEngine,
    StopRules,
)
from ppo_lightning.rollout.engines import native
from ppo_lightning.rollout.engines.draw import draw_tokens
from tests.helpers.scripted import Letters, ScriptedLM, prompt_batch

STOPS = StopRules(end_ids=(9,), pad_id=0, decoder=Letters())
ENGINES = [NativeEngine(), GenerateEngine()]


def scripted(scripts, *, sampling, stops=STOPS):
    model = ScriptedLM(scripts)
    prompts = prompt_batch([[1, 2]] * len(scripts))
    return NativeEngine().generate(model, prompts, sampling=sampling, stops=stops, policy_version=7)


def generate(engine, folder, *, prompts, greedy=False, stops=None, **sampling):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rules = stops or StopRules(end_ids=(), pad_id=0)
    config = SamplingConfig(**sampling)
    return model, engine.generate(
        model, prompts, sampling=config, stops=rules, policy_version=0, greedy=greedy
    )


def test_a_sampler_of_its_own_dtype_says_what_the_trainer_says_at_far_positions(tiny_llama_dir):
    """Rotary frequencies in 16 bits would turn far positions elsewhere."""
    prompts = prompt_batch([[5, 9, 11] * 40, [12, 7, 30] * 20])
    found = [
        generate(NativeEngine(dtype=dtype), tiny_llama_dir, prompts=prompts, max_new_tokens=4)
        for dtype in (None, "bfloat16")
    ]
    (model, exact), (copied, coarse) = found
    assert copied.dtype == torch.float32  # the policy stays what it was
    assert not torch.equal(exact.sampler_logprobs[:, 0], coarse.sampler_logprobs[:, 0])
    copy = native._copy_in(torch.bfloat16, model)
    assert {weight.dtype for weight in copy.parameters()} == {torch.bfloat16}
    assert torch.equal(copy.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert copy.dtype == torch.bfloat16


def test_t13_no_end_token_is_written_over_the_last_sampled_one():
    rollout = scripted([[3, 4, 5, 6]], sampling=SamplingConfig(max_new_tokens=4))
    assert rollout.response_ids.tolist() == [[3, 4, 5, 6]]
    assert rollout.truncated.tolist() == [True]
    assert rollout.response_mask.all()


def test_t14_masks_come_from_lengths():
    sampling = SamplingConfig(max_new_tokens=6, stop_strings=["fg"])
    rollout = scripted([[3, 4, 9], [3, 4, 5, 6, 7]], sampling=sampling)
    assert rollout.response_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert rollout.truncated.tolist() == [False, False]


def test_t15_end_token_is_valid_where_pad_equals_end():
    stops = StopRules(end_ids=(9,), pad_id=9)
    sampling = SamplingConfig(max_new_tokens=6)
    rollout = scripted([[3, 4, 9], [3, 3, 3, 3, 9]], sampling=sampling, stops=stops)
    assert rollout.response_mask.sum(1).tolist() == [3, 5]
    assert rollout.response_ids[0].tolist() == [3, 4, 9, 9, 9]


def test_t16_any_of_several_end_tokens_ends_the_response():
    stops = StopRules(end_ids=(5, 9), pad_id=0)
    rollout = scripted([[1, 9, 3, 5]], sampling=SamplingConfig(max_new_tokens=4), stops=stops)
    assert rollout.response_ids.tolist() == [[1, 9]]
    assert rollout.truncated.tolist() == [False]


def test_t18_end_token_at_once_is_a_response_of_one_token():
    rollout = scripted([[9], [3, 9]], sampling=SamplingConfig(max_new_tokens=4))
    assert rollout.response_mask.tolist() == [[True, False], [True, True]]
    assert rollout.response_ids[0, 0] == 9


def test_decoding_stops_when_every_row_has_ended():
    model = ScriptedLM([[9], [3, 9]])
    NativeEngine().generate(
        model,
        prompt_batch([[1], [2]]),
        sampling=SamplingConfig(max_new_tokens=50),
        stops=STOPS,
        policy_version=0,
    )
    assert model.calls == 1  # the prompt, then one more token


def test_end_tokens_are_not_drawn_before_the_least_length(tiny_llama_dir):
    every_id = tuple(range(40))
    _, rollout = generate(
        NativeEngine(),
        tiny_llama_dir,
        prompts=prompt_batch([[5, 6]] * 8),
        stops=StopRules(end_ids=every_id, pad_id=0),
        max_new_tokens=5,
        min_new_tokens=3,
    )
    assert (rollout.response_mask.sum(1) >= 4).all()
    assert not torch.isin(rollout.response_ids[:, :3], torch.tensor(every_id)).any()


@pytest.mark.parametrize("engine", ENGINES, ids=["native", "generate"])
def test_recorded_logprobs_are_those_of_a_forward_pass(engine, tiny_model_dir):
    """T11: at the sampling temperature, also where top-k cuts the distribution."""
    prompts = prompt_batch([[5, 6, 7, 8, 9, 10], [11, 12]])
    model, rollout = generate(
        engine, tiny_model_dir, prompts=prompts, max_new_tokens=5, temperature=0.7, top_k=4
    )
    sequences = rollout.sequences
    mask = sequences.attention_mask
    logits = model(
        input_ids=sequences.input_ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
    ).logits
    width = prompts.prompt_ids.shape[1]
    expected = (logits[:, width - 1 : -1] / 0.7).log_softmax(-1)
    expected = expected.gather(2, rollout.response_ids[..., None])[..., 0]
    assert_close(rollout.sampler_logprobs, expected, rtol=1e-5, atol=1e-5)


def test_engines_agree_token_for_token_in_greedy_mode(tiny_model_dir):
    prompts = prompt_batch([[5, 6, 7, 8], [11, 12], [13]])
    stops = StopRules(end_ids=(20, 21, 22, 23, 24), pad_id=0)
    native, reference = (
        generate(e, tiny_model_dir, prompts=prompts, greedy=True, stops=stops, max_new_tokens=12)[1]
        for e in ENGINES
    )
    assert native.response_ids.tolist() == reference.response_ids.tolist()
    assert native.response_mask.tolist() == reference.response_mask.tolist()
    assert native.truncated.tolist() == reference.truncated.tolist()


def test_a_response_does_not_depend_on_its_neighbours(tiny_model_dir):
    prompts = prompt_batch([[5, 6, 7, 8], [11, 12], [13], [14, 15, 16]])
    _, together = generate(NativeEngine(), tiny_model_dir, prompts=prompts, max_new_tokens=8)
    _, two = generate(
        NativeEngine(), tiny_model_dir, prompts=prompts, max_new_tokens=8, batch_size=3
    )
    last = prompts.select(torch.tensor([3]))
    _, alone = generate(NativeEngine(), tiny_model_dir, prompts=last, max_new_tokens=8)
    assert two.response_ids.tolist() == together.response_ids.tolist()
    assert alone.response_ids[0].tolist() == together.response_ids[3].tolist()


def test_other_keys_give_other_responses(tiny_llama_dir):
    first, second = (
        generate(
            NativeEngine(),
            tiny_llama_dir,
            prompts=prompt_batch([[5, 6]] * 4, seed=seed),
            max_new_tokens=8,
        )[1].response_ids.tolist()
        for seed in (1, 2)
    )
    assert first != second
    assert len({tuple(ids) for ids in first}) > 1


def test_t12_the_folders_own_sampling_settings_are_not_used(tiny_llama_dir):
    prompts = prompt_batch([[5, 6]] * 64)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).eval()
    settings = {"sampling": SamplingConfig(max_new_tokens=3), "policy_version": 0}
    settings |= {"stops": StopRules(end_ids=(), pad_id=0)}
    for engine in ENGINES:
        model.generation_config = GenerationConfig()
        plain = engine.generate(model, prompts, **settings).response_ids
        own = GenerationConfig(
            do_sample=True, top_k=1, top_p=0.1, repetition_penalty=5.0, min_p=0.9, temperature=0.1
        )
        model.generation_config = own
        assert engine.generate(model, prompts, **settings).response_ids.equal(plain)
        assert model.generation_config is own  # kept for export


def test_t11_numbers_of_the_sampling_temperature():
    logits = torch.tensor([[2.0, 0.0]])
    half = SamplingConfig(temperature=0.5)
    ids, logprobs = draw_tokens(logits, torch.tensor([0.5], dtype=torch.float64), sampling=half)
    assert ids.tolist() == [0]
    assert_close(logprobs, torch.tensor([-0.01815]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES, ids=["native", "generate"])
def test_t11_one_engine_samples_at_the_temperature_of_each_call(engine, tiny_model_dir):
    prompts = prompt_batch([[5, 6, 7, 8, 9, 10], [11, 12]])
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)))
    settings = {"stops": StopRules(end_ids=(), pad_id=0), "policy_version": 0}
    found = {}
    for temperature in (1.0, 0.5, 1.7, 1.0):
        sampling = SamplingConfig(max_new_tokens=8, temperature=temperature)
        rollout = engine.generate(model, prompts, sampling=sampling, **settings)
        with torch.no_grad():
            own = policy_logprobs(model, rollout.sequences, temperature=temperature).logprobs
        assert_close(rollout.sampler_logprobs, own, rtol=0, atol=1e-5)
        assert rollout.temperature == temperature
        ids = found.setdefault(temperature, rollout.response_ids)
        assert rollout.response_ids.equal(ids)
    assert not found[1.0].equal(found[0.5])
    assert not found[1.0].equal(found[1.7])


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingConfig(top_k=2), {0, 1}),
        (SamplingConfig(top_p=0.6), {0, 1}),  # 0.5 alone is less than 0.6
        (SamplingConfig(top_p=0.5), {0}),
        (SamplingConfig(), {0, 1, 2, 3}),
    ],
)
def test_truncation_limits_the_draw_but_not_the_logprob(sampling, allowed):
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    logits = probabilities.log().expand(200, -1)
    ids, logprobs = draw_tokens(logits, uniforms, sampling=sampling)
    assert set(ids.tolist()) == allowed
    assert_close(logprobs, probabilities.log()[ids])


def test_stop_strings_need_a_decoder():
    with pytest.raises(ValueError, match="stop_strings"):
        scripted(
            [[1, 2]],
            sampling=SamplingConfig(stop_strings=["x"]),
            stops=StopRules(end_ids=(9,), pad_id=0),
        )


@pytest.mark.parametrize("engine", ENGINES, ids=["native", "generate"])
def test_no_prompts_give_no_rows_and_ask_nothing_of_the_model(engine):
    none = prompt_batch([[1, 2]]).select(torch.arange(0))
    rollout = engine.generate(
        torch.nn.Module(), none, sampling=SamplingConfig(), stops=STOPS, policy_version=3
    )
    assert rollout.response_ids.shape == rollout.response_mask.shape == (0, 0)
    assert rollout.response_ids.dtype == torch.long
    assert rollout.response_mask.dtype == rollout.truncated.dtype == torch.bool
    assert rollout.truncated.shape == (0,)


def test_no_prompts_copy_no_weights(tiny_llama_dir, monkeypatch):
    copies = []
    monkeypatch.setattr(native, "_copy_in", lambda dtype, model: copies.append(dtype) or model)
    for prompts in (prompt_batch([[1, 2]]).select(torch.arange(0)), prompt_batch([[1, 2]])):
        engine = NativeEngine(dtype="bfloat16")
        _, rollout = generate(engine, tiny_llama_dir, prompts=prompts, max_new_tokens=2)
        assert len(rollout.response_ids) == len(prompts) == len(copies)


def test_batches_of_different_widths_are_joined_to_the_widest():
    class Counting(BatchedEngine):
        """Row k answers with k + 1 tokens."""

        def decode_batch(self, model, prompts, *, sampling, stops, greedy):
            lengths = prompts.indices + 1
            ids = torch.ones(len(prompts), int(lengths.max()), dtype=torch.long)
            return Decoded(ids=ids, logprobs=-ids.float(), lengths=lengths, ended=lengths > 2)

    rollout = Counting().generate(
        torch.nn.Module(),
        prompt_batch([[1]] * 3),
        sampling=SamplingConfig(batch_size=2),
        stops=STOPS,
        policy_version=0,
    )
    assert rollout.response_mask.sum(1).tolist() == [1, 2, 3]
    assert rollout.response_ids.tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert rollout.sampler_logprobs[:2, 2].tolist() == [0, 0]
    assert rollout.truncated.tolist() == [True, True, False]


def test_t21_activation_checkpointing_changes_no_id_and_no_pass(tiny_model_dir):
    """The prompt is read once and each token once, whatever the update will recompute."""
    prompts, found = prompt_batch([[5, 6, 7, 8], [11, 12]]), []
    settings = {"sampling": SamplingConfig(max_new_tokens=5), "policy_version": 0}
    for checkpointing in (False, True):
        policy = PolicyConfig(path=str(tiny_model_dir), gradient_checkpointing=checkpointing)
        model, widths = load_causal_lm(policy).train(), []
        model.register_forward_pre_hook(
            lambda _, __, inputs, widths=widths: widths.append(inputs["input_ids"].numel()),
            with_kwargs=True,
        )
        stops = StopRules(end_ids=(), pad_id=0)
        rollout = NativeEngine().generate(model, prompts, stops=stops, **settings)
        found.append(rollout.response_ids.tolist())
        assert widths == [6, 2, 2, 2, 2]
        assert model.training
    assert found[0] == found[1]
