"""vLLM as an engine: what is asked, what is read, and how it fails.

vLLM needs a GPU. Its double in ``tests.helpers.vllm_double`` keeps to a written contract.
"""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_lightning.configs import SamplingConfig
from ppo_lightning.errors import ConfigError, ModelError, RolloutError
from ppo_lightning.rollout import NativeEngine, StopRules, VLLMEngine
from ppo_lightning.rollout.engines import vllm as engine_module
from ppo_lightning.rollout.engines.vllm_requests import decoded
from tests.helpers import vllm_double
from tests.helpers.scripted import Letters, prompt_batch
from tests.helpers.vllm_asking import OPEN, PROMPTS, as_trained, ask, change, loaded, same


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Every vLLM that was started."""
    return vllm_double.install(monkeypatch)


# -------------------------------------------------------------------------- requests


def test_logprobs_are_the_trainers(tiny_model_dir):
    model = loaded(tiny_model_dir)
    rollout = ask(VLLMEngine(), model, top_k=4, top_p=0.9)
    assert rollout.sampler_logprobs.dtype == torch.float32
    as_trained(rollout, model)
    as_trained(ask(VLLMEngine(), model, temperature=0.7), model, temperature=0.7)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"top_k": 4}, "`top_k`"),
        ({"top_p": 0.9}, "`top_p`"),
        ({"min_new_tokens": 2}, "`min_new_tokens`"),
        ({"temperature": 0.001}, r"0\.01 to 2, got 0\.001"),
        ({"temperature": 2.5}, r"0\.01 to 2, got 2\.5"),
    ],
)
def test_logprobs_that_vllm_cannot_give_are_refused(settings, what, tiny_llama_dir):
    with pytest.raises(ConfigError, match=rf"`sampling\.temperature`.*{what}"):
        ask(VLLMEngine(), loaded(tiny_llama_dir), **({"temperature": 0.7} | settings))


def test_one_engine_measures_at_every_temperature(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    for temperature in (1.0, 0.5, 1.0, 2.0):
        rollout = ask(engine, model, temperature=temperature)
        assert rollout.temperature == temperature
        as_trained(rollout, model, temperature=temperature)
        as_trained(ask(engine, model, temperature=temperature, greedy=True), model)
    assert len(started) == 1


def test_one_engine_measures_before_or_after_tokens_are_ruled_out(tiny_llama_dir):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    with pytest.raises(ConfigError, match=r"`sampling\.top_k`, `top_p` or .*: this engine"):
        ask(engine, model, top_k=4)


def test_it_says_between_which_temperatures_it_samples():
    engine = VLLMEngine()
    assert engine.temperatures(SamplingConfig(temperature=0.7)) == (0.01, 2.0)
    for settings in ({"top_k": 4}, {"top_p": 0.9}, {"min_new_tokens": 2}):
        assert engine.temperatures(SamplingConfig(**settings)) == (1.0, 1.0)


def test_a_response_depends_on_its_key_alone(tiny_llama_dir):
    model = loaded(tiny_llama_dir)
    together = ask(VLLMEngine(), model)
    assert together.response_ids[1].tolist() != together.response_ids[3].tolist()
    last = prompt_batch(PROMPTS).select(torch.tensor([3]))
    alone = VLLMEngine().generate(
        model, last, sampling=SamplingConfig(max_new_tokens=6), stops=OPEN, policy_version=0
    )
    assert alone.response_ids[0].tolist() == together.response_ids[3].tolist()
    same(ask(VLLMEngine(), model, batch_size=3), together)
    other = ask(VLLMEngine(), model, seed=1)
    assert other.response_ids.tolist() != together.response_ids.tolist()


def test_every_key_is_a_seed(tiny_llama_dir, started):
    """Keys fill 64 bits; to vLLM -1 is none."""
    prompts = replace(prompt_batch([[5]] * 3), keys=torch.tensor([-1, -(2**63), 2**63 - 1]))
    VLLMEngine().generate(
        loaded(tiny_llama_dir),
        prompts,
        sampling=SamplingConfig(max_new_tokens=1),
        stops=OPEN,
        policy_version=0,
    )
    seeds = [request.params.seed for request in started[0].requests]
    assert seeds == [2**63 - 1, 0, 2**63 - 1]


def test_what_is_asked_is_said_in_full(tiny_llama_dir, started):
    stops = StopRules(end_ids=(2, 9), pad_id=0)
    engine = VLLMEngine(0.25, 32, 2, enforce_eager=True)
    ask(engine, loaded(tiny_llama_dir), [[5, 6], [7]], stops=stops, min_new_tokens=2, top_k=3)
    (llm,) = started
    asked = {"gpu_memory_utilization": 0.25, "max_model_len": 32, "tensor_parallel_size": 2}
    asked |= {"enforce_eager": True, "generation_config": "vllm"}
    assert llm.options.items() >= asked.items()
    assert [request.ids for request in llm.requests] == [[5, 6], [7]]
    params = llm.requests[0].params
    assert (params.top_k, params.min_tokens, params.max_tokens) == (3, 2, 6)
    assert params.stop_token_ids == [2, 9]
    assert params.ignore_eos
    assert params.logprobs == 0


def test_no_prompts_start_nothing(started):
    none = prompt_batch([[1, 2]]).select(torch.arange(0))
    rollout = VLLMEngine().generate(
        torch.nn.Module(), none, sampling=SamplingConfig(), stops=OPEN, policy_version=3
    )
    assert rollout.response_ids.shape == (0, 0)
    assert rollout.policy_version == 3
    assert started == []


def test_an_empty_prompt_is_refused(tiny_llama_dir):
    prompts = prompt_batch([[5, 6], [7]])
    prompts = replace(prompts, prompt_mask=prompts.prompt_mask & torch.tensor([[True], [False]]))
    with pytest.raises(ConfigError, match="empty prompt"):
        VLLMEngine().generate(
            loaded(tiny_llama_dir),
            prompts,
            sampling=SamplingConfig(),
            stops=OPEN,
            policy_version=0,
        )


# -------------------------------------------------------------------------- answers


def test_end_tokens_end_and_belong_to_a_response(tiny_model_dir):
    model, stops = loaded(tiny_model_dir), StopRules(end_ids=tuple(range(20, 30)), pad_id=0)
    rollout = ask(VLLMEngine(), model, PROMPTS * 8, stops=stops)
    ended = ~rollout.truncated
    assert ended.any()
    assert rollout.truncated.any()
    last = rollout.response_ids.gather(1, rollout.response_mask.sum(1, keepdim=True) - 1)[:, 0]
    assert (torch.isin(last, torch.tensor(stops.end_ids)) == ended).all()
    assert (rollout.response_mask.sum(1)[~ended] == 6).all()
    greedy = {"greedy": True, "stops": stops, "max_new_tokens": 12}
    same(ask(VLLMEngine(), model, **greedy), ask(NativeEngine(), model, **greedy))


def test_no_end_token_comes_before_the_least_length(tiny_llama_dir):
    stops = StopRules(end_ids=tuple(range(40)), pad_id=0)
    model = loaded(tiny_llama_dir)
    rollout = ask(VLLMEngine(), model, PROMPTS * 2, stops=stops, min_new_tokens=3)
    assert (rollout.response_mask.sum(1) >= 4).all()
    as_trained(rollout, model)


def test_the_folders_own_end_tokens_and_settings_do_not_count(tiny_llama_dir):
    """The end of the tokenizer here, 2, is drawn like any other token."""
    model = loaded(tiny_llama_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    with torch.no_grad():
        model.lm_head.weight[2] *= 4
    stops = StopRules(end_ids=(), pad_id=0, decoder=tokenizer)
    rollout = ask(VLLMEngine(), model, PROMPTS * 8, stops=stops, stop_strings=["no such text"])
    assert (rollout.response_ids == tokenizer.eos_token_id).any()
    assert rollout.truncated.all()


@pytest.mark.parametrize("overshoot", [0, 2])
@pytest.mark.parametrize("least", [0, 4])
def test_stop_strings_end_where_the_native_engine_ends(overshoot, least, tiny_gpt2_dir, started):
    """Also where vLLM does not look before the least length, or sees several tokens at once."""
    model, tokenizer = loaded(tiny_gpt2_dir), AutoTokenizer.from_pretrained(tiny_gpt2_dir)
    stops = StopRules(end_ids=(), pad_id=1, decoder=tokenizer)
    free = ask(NativeEngine(), model, greedy=True, max_new_tokens=10, stops=stops)
    text = tokenizer.decode(free.response_ids[0].tolist(), skip_special_tokens=True)
    settings = {"stop_strings": [text[2:4]], "min_new_tokens": least, "max_new_tokens": 10}
    settings |= {"greedy": True, "stops": stops}
    engine = VLLMEngine()
    ask(engine, model, **settings)
    started[0].faults.overshoot = overshoot
    expected = ask(NativeEngine(), model, **settings)
    assert not expected.truncated[0]
    same(ask(engine, model, **settings), expected)
    assert started[0].requests[0].params.stop == [text[2:4]]


def test_without_files_of_a_tokenizer_stop_strings_are_found_afterwards(tiny_llama_dir, started):
    model, stops = loaded(tiny_llama_dir), StopRules(end_ids=(), pad_id=0, decoder=Letters())
    free = ask(NativeEngine(), model, greedy=True)
    letter = Letters().decode([int(free.response_ids[0, 2])])
    settings = {"greedy": True, "stops": stops, "stop_strings": [letter]}
    same(ask(VLLMEngine(), model, **settings), ask(NativeEngine(), model, **settings))
    assert started[0].options["skip_tokenizer_init"]
    with pytest.raises(ValueError, match="stop_strings"):
        ask(VLLMEngine(), model, stop_strings=["x"])


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_other_ends_of_a_response_are_errors(reason, tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    started[0].faults.finish_reason = reason
    with pytest.raises(RolloutError, match=rf"after 6 tokens with `{reason}`"):
        ask(engine, model)


def test_answers_that_are_missing_are_errors(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    started[0].faults.lost = 1
    with pytest.raises(RolloutError, match="3 answers to 4 prompts"):
        ask(engine, model)


def test_too_little_room_is_told_and_not_taken_for_an_end(tiny_llama_dir):
    model = loaded(tiny_llama_dir)
    with pytest.raises(ConfigError, match=r"`max_model_len` of the engine is 8, .* needs 10"):
        ask(VLLMEngine(max_model_len=8), model)
    with pytest.raises(ConfigError, match=r"no room for more than \d+ response tokens"):
        ask(VLLMEngine(), model, [[5] * 126], max_new_tokens=6)


def test_logprobs_that_are_missing_are_errors():
    answer = SimpleNamespace(token_ids=[3, 4], finish_reason="length", logprobs=[{}])
    with pytest.raises(RolloutError, match="of 1 tokens for a response of 2"):
        decoded(
            [SimpleNamespace(outputs=[answer])],
            prompt_batch([[1]]),
            sampling=SamplingConfig(max_new_tokens=2),
            stops=OPEN,
        )


# -------------------------------------------------------------------------- failures


def test_a_dead_engine_is_told_once_and_asked_no_more(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    started[0].faults.dead = True
    said = r"could not answer: EngineDeadError: EngineCore .*`--ckpt_path last`"
    with pytest.raises(RolloutError, match=said) as caught:
        ask(engine, model)
    assert "\n" not in str(caught.value)
    started[0].faults.dead = False
    with pytest.raises(RolloutError, match=said):
        ask(engine, model)


def test_after_weights_that_did_not_arrive_no_old_ones_answer(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    change(model)
    started[0].faults.dies_loading = True
    for _ in range(2):
        with pytest.raises(RolloutError, match="could not take the weights: EngineDeadError"):
            ask(engine, model, version=1)
        started[0].faults.dead = False
    assert len(started[0].requests) == len(PROMPTS)


def test_weights_of_another_version_do_not_answer(tiny_llama_dir, started):
    engine, model = VLLMEngine(), loaded(tiny_llama_dir)
    ask(engine, model)
    started[0].faults.version = "default"
    with pytest.raises(RolloutError, match=r"holds the weights `default`, and `0\.0` were given"):
        ask(engine, model)


def test_a_slow_engine_ends_the_run_in_time(tiny_llama_dir, started):
    free = threading.Event()
    vllm_double.LLM.stuck = free
    engine, model = VLLMEngine(timeout_s=0.5), loaded(tiny_llama_dir)
    said = r"could not answer: TimeoutError: .*`timeout_s: 0\.5`.*`--ckpt_path last`"
    try:
        for _ in range(2):
            with pytest.raises(RolloutError, match=said):
                ask(engine, model)
    finally:  # the thread that was left to itself must not compute while the process ends
        started[0].faults.dead = True
        free.set()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and thread.name == "reward answer":
                thread.join(30)


def test_weights_that_come_late_but_in_time_are_taken(tiny_llama_dir, started):
    engine, model = VLLMEngine(timeout_s=30), loaded(tiny_llama_dir)
    ask(engine, model)
    free = started[0].faults.stuck = threading.Event()
    timer = threading.Timer(0.3, free.set)
    timer.start()
    ask(engine, model, version=1)
    assert len(started[0].loads) == 2


# -------------------------------------------------------------------------- checks


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tiny_llama_dir):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"`VLLMEngine` needs .*pip install 'ppo-lightning\[vllm"):
        VLLMEngine().check(loaded(tiny_llama_dir))


def test_another_release_is_refused(monkeypatch, tiny_llama_dir):
    vllm_double.install(monkeypatch, version="0.31.0")
    with pytest.raises(ConfigError, match=r"for vLLM 0\.30, and 0\.31\.0 is installed"):
        VLLMEngine().check(loaded(tiny_llama_dir))


def test_several_processes_are_refused(monkeypatch, tiny_llama_dir):
    monkeypatch.setattr(engine_module, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"one process, and this run has 2: .*`trainer\.devices"):
        VLLMEngine().check(loaded(tiny_llama_dir))


def test_weights_that_are_no_folder_are_refused(tiny_llama_dir):
    with pytest.raises(ModelError, match="a Linear writes none"):
        VLLMEngine().check(torch.nn.Linear(2, 2))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    weight = torch.zeros(2, dtype=torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ModelError, match=r"`lm_head\.weight` of the Llama.* torch\.int8"):
        VLLMEngine().check(model)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("max_model_len", 1),
        ("tensor_parallel_size", 0),
        ("dtype", "int8"),
        ("sleep_level", 3),
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
        ("timeout_s", None),
    ],
)
def test_settings_are_checked_by_name(setting, value):
    with pytest.raises(ValueError, match=f"`{setting}` must"):
        VLLMEngine(**{setting: value})


def test_end_ids_of_a_real_run_end_responses(tiny_llama_dir):
    model, tokenizer = loaded(tiny_llama_dir), AutoTokenizer.from_pretrained(tiny_llama_dir)
    sampling = SamplingConfig(max_new_tokens=6)
    stops = StopRules.build(tokenizer, model, sampling)
    assert stops.end_ids
    greedy = {"greedy": True, "stops": stops}
    same(ask(VLLMEngine(), model, **greedy), ask(NativeEngine(), model, **greedy))
