"""The engine that samples in another process, without a run around it."""

import time

import pytest
import torch

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.errors import ConfigError, RolloutError
from ppo_lightning.models import build_policy
from ppo_lightning.rollout import AsyncEngine, GenerateEngine, NativeEngine, StopRules, VLLMEngine
from ppo_lightning.rollout.engines import async_process, asynchronous
from ppo_lightning.rollout.engines.shared_weights import SharedWeights
from tests.helpers.sampling_process import Faulty, fork_samplers, lives
from tests.helpers.scripted import prompt_batch

SETTINGS = {
    "sampling": SamplingConfig(max_new_tokens=5),
    "stops": StopRules(end_ids=(2,), pad_id=0),
    "policy_version": 3,
}
PROMPTS = prompt_batch([[5, 9, 11], [12, 7], [6]])
BEAT = 0.01
COLUMNS = ("response_ids", "response_mask", "sampler_logprobs", "truncated")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    fork_samplers(monkeypatch)


@pytest.fixture
def made(tiny_llama_dir):
    """Makes engines that are closed again, and their model."""
    policy, engines = PolicyConfig(path=str(tiny_llama_dir)), []

    def make(*arguments, **settings):
        engines.append(AsyncEngine(*arguments, **{"timeout": 60} | settings))
        engines[-1].prepare(policy)
        return engines[-1], build_policy(policy)

    yield make
    for engine in engines:
        engine.close()


def equal(a, b):
    return all(getattr(a, name).equal(getattr(b, name)) for name in COLUMNS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ahead": 2}, "`ahead` of AsyncEngine must be 0 or 1, got 2"),
        ({"timeout": 0.0}, "`timeout` must be"),
        ({"engine": AsyncEngine()}, "a AsyncEngine, which samples outside"),
        ({"engine": VLLMEngine()}, "a VLLMEngine, which samples outside"),
    ],
    ids=["ahead", "timeout", "nested", "vllm"],
)
def test_settings_that_make_no_sense_are_refused(arguments, said):
    with pytest.raises((ValueError, ConfigError), match=said):
        AsyncEngine(**arguments)


def test_each_task_is_answered_with_the_weights_that_came_with_it(made):
    engine, model = made()
    engine.begin(model, PROMPTS, **SETTINGS)
    with pytest.raises(RolloutError, match="sampled already"):
        engine.begin(model, PROMPTS, **SETTINGS)
    before = NativeEngine().generate(model, PROMPTS, **SETTINGS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)  # while it samples
    assert equal(engine.finish(), before)
    with pytest.raises(RolloutError, match="nothing is being sampled"):
        engine.finish()
    engine.begin(model, PROMPTS, **{**SETTINGS, "policy_version": 4})
    after, expected = engine.finish(), NativeEngine().generate(model, PROMPTS, **SETTINGS)
    assert equal(after, expected)
    assert not equal(after, before)
    assert after.policy_version == 4
    assert after.prompts.records == PROMPTS.records


def test_t11_each_task_is_answered_at_the_temperature_that_came_with_it(made):
    engine, model = made()
    for temperature in (0.5, 1.7):
        sampling = SamplingConfig(max_new_tokens=5, temperature=temperature)
        settings = {**SETTINGS, "sampling": sampling}
        engine.begin(model, PROMPTS, **settings)
        found = engine.finish()
        assert found.temperature == temperature
        assert equal(found, NativeEngine().generate(model, PROMPTS, **settings))


def test_the_engine_inside_says_between_which_temperatures_it_samples():
    class Narrow(NativeEngine):
        def temperatures(self, sampling):
            return 0.9, 1.1

    assert AsyncEngine(Narrow()).temperatures(SamplingConfig()) == (0.9, 1.1)


def test_it_computes_in_the_dtypes_of_the_trainers_model(made):
    engine, model = made()
    model = model.to(torch.bfloat16)
    engine.begin(model, PROMPTS, **SETTINGS)
    assert equal(engine.finish(), NativeEngine().generate(model, PROMPTS, **SETTINGS))


def test_the_engine_inside_is_the_one_that_samples(made):
    engine, model = made(GenerateEngine())
    engine.begin(model, PROMPTS, **SETTINGS)
    inner = engine.finish()
    assert inner.response_mask.any()
    assert NativeEngine(dtype="bfloat16").dtype is AsyncEngine(NativeEngine("bfloat16")).dtype


class Slow(NativeEngine):
    """Takes many beats for a buffer."""

    def generate(self, model, prompts, **settings):
        time.sleep(20 * BEAT)
        return super().generate(model, prompts, **settings)


def test_a_trainer_that_waits_for_a_buffer_makes_progress(made, monkeypatch):
    """Or the watchdog would take it for one that hangs."""
    beats = []
    monkeypatch.setattr(async_process.pulse, "beat", lambda: beats.append(1))
    monkeypatch.setattr(async_process, "BEAT_SECONDS", BEAT)
    engine, model = made(Slow())
    engine.begin(model, PROMPTS, **SETTINGS)
    beats.clear()
    assert engine.finish().response_mask.any()
    assert len(beats) > 2


def test_a_process_that_was_closed_is_gone_and_another_one_starts(made):
    engine, model = made()
    engine.begin(model, PROMPTS, **SETTINGS)
    first = engine.pid
    engine.close()
    engine.close()
    assert not lives(first)
    engine.begin(model, PROMPTS, **SETTINGS)
    assert engine.finish().response_mask.any()
    assert engine.pid != first


def test_after_a_failure_it_is_asked_nothing_any_more(made):
    engine, model = made(Faulty("raise", at=1))
    engine.begin(model, PROMPTS, **SETTINGS)
    with pytest.raises(RolloutError, match=r"RuntimeError: the cache is full\. Its own messages"):
        engine.finish()
    assert not lives(engine.pid)
    with pytest.raises(RolloutError, match="the cache is full"):
        engine.begin(model, PROMPTS, **SETTINGS)


def test_a_model_that_cannot_be_loaded_is_said(tmp_path, made):
    engine, model = made()
    engine.prepare(PolicyConfig(path=str(tmp_path)))
    with pytest.raises(RolloutError, match="failed while starting: ModelError"):
        engine.begin(model, PROMPTS, **SETTINGS)


def test_another_model_in_the_folder_is_said(tmp_path, made):
    from tests.helpers.tiny_models import build_llama

    engine, model = made()
    other = build_llama(tmp_path / "other", num_hidden_layers=1)
    engine.prepare(PolicyConfig(path=str(other)))
    with pytest.raises(RolloutError, match=r"is not the trainer's: `model\.layers\.1"):
        engine.begin(model, PROMPTS, **SETTINGS)


def test_an_engine_that_cannot_be_sent_is_said(made):
    class Local(NativeEngine):
        """Stands in no file that can be imported."""

    engine, model = made(Local())
    with pytest.raises(RolloutError, match=r"could not be started: .*must be picklable"):
        engine.begin(model, PROMPTS, **SETTINGS)


def test_each_rank_has_its_device(monkeypatch):
    cpu = torch.device("cpu")
    assert asynchronous._own(None, cpu) == "cpu"
    assert asynchronous._own("cuda:1", cpu) == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert asynchronous._own(["cuda:2", "cuda:3"], cpu) == "cuda:3"
    with pytest.raises(ConfigError, match="has 1 entries, and this is rank 1"):
        asynchronous._own(["cuda:2"], cpu)


def test_shared_weights_travel_whole_and_refuse_another_model():
    source = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.bfloat16)}
    shared = SharedWeights(source)
    assert shared.write(source) == 6 * 4 + 2 * 2
    target = {name: torch.zeros_like(value) for name, value in source.items()}
    shared.read_into(target)
    assert all(target[name].equal(value) for name, value in source.items())
    with pytest.raises(RolloutError, match="`c` differs"):
        shared.read_into({**target, "c": torch.zeros(1)})
    with pytest.raises(RolloutError, match="`a` differs"):
        shared.read_into({**target, "a": torch.zeros(3, 2)})
    shared.close()
