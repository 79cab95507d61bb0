"""CUDA graphs of steps: buckets, buffers and ways out, with a double of the recording."""

import logging

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.models import load_causal_lm
from ppo_lightning.rollout import NativeEngine, StopRules
from ppo_lightning.rollout.engines import graphs, slots
from ppo_lightning.rollout.engines.graphs import StepGraphs, can_be_recorded, is_whole_on, slots_of
from tests.helpers.scripted import Letters, prompt_batch
from tests.unit.rollout.test_slots import ENDS, PROMPTS, assert_same

CPU = torch.device("cpu")


class Recorder:
    """Records nothing: a replay calls the function again. Counts both."""

    def __init__(self, fault=None):
        self.recorded, self.replayed, self.fault = 0, 0, fault

    def __call__(self, run):
        if self.fault is not None:
            raise self.fault
        self.recorded += 1

        def replay():
            self.replayed += 1
            run()

        return replay


def double(calls=None):
    """Logits that tell their inputs apart; what a step was asked for goes to ``calls``."""

    def step(ids, lengths, span):
        if calls is not None:
            calls.append((ids.tolist(), lengths.tolist(), span))
        return torch.stack([ids.float(), lengths.float(), torch.full_like(ids, span).float()], 1)

    return step


def test_buckets_of_slots_are_powers_of_two_and_half_way_between():
    assert [slots_of(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 24, 25, 33)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 24, 32, 48,
    ]  # fmt: skip


def test_steps_go_through_buffers_of_their_bucket():
    calls = []
    steps = StepGraphs(double(calls), 7, 300, CPU, Recorder())
    found = steps(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([1, 2, 3, 4, 129]), 130)
    assert calls == [([5, 6, 7, 8, 9, 0], [1, 2, 3, 4, 129, 0], 256)]
    assert found.tolist() == [[5, 1, 256], [6, 2, 256], [7, 3, 256], [8, 4, 256], [9, 129, 256]]
    steps(torch.arange(7), torch.full((7,), 260), 261)
    assert len(calls[1][0]) == 7  # no more slots than there are
    assert calls[1][2] == 300  # and no more columns


def test_slots_behind_hold_nothing_of_the_step_before():
    calls = []
    steps = StepGraphs(double(calls), 8, 300, CPU, Recorder())
    steps(torch.full((6,), 9), torch.full((6,), 9), 10)
    steps(torch.full((5,), 3), torch.full((5,), 3), 4)
    assert calls[1][:2] == ([3, 3, 3, 3, 3, 0], [3, 3, 3, 3, 3, 0])


def test_a_bucket_is_recorded_once_and_replayed_with_new_inputs():
    calls, recorder = [], Recorder()
    steps = StepGraphs(double(calls), 4, 300, CPU, recorder)
    for length in range(1, 6):
        found = steps(torch.tensor([length, 2]), torch.tensor([length, 1]), length + 1)
        assert found.tolist() == [[length, length, 128], [2, 1, 128]]
    # Two plain steps, a replay to compare, and three steps that are replays alone.
    assert (recorder.recorded, recorder.replayed, len(calls)) == (1, 1 + 3, 2 + 1 + 3)
    for length in (127, 128, 129):
        steps(torch.tensor([7, 2]), torch.tensor([length, 1]), length + 1)
    assert recorder.recorded == 2  # of the next bucket


@pytest.mark.parametrize("fault", ["recording", "replay"])
def test_what_cannot_be_recorded_goes_on_plainly(caplog, fault):
    wrong = fault == "replay"
    error = None if wrong else RuntimeError("operation not permitted when stream is capturing\nC++")
    recorder, calls, off = Recorder(error), [], []

    def step(ids, lengths, span):
        return double(calls)(ids, lengths, span) + len(off)

    def capture(run):
        replay = recorder(run)

        def wrongly():
            off.append(1)
            replay()
            off.clear()

        return wrongly

    steps = StepGraphs(step, 4, 300, CPU, capture if wrong else recorder)
    with caplog.at_level(logging.WARNING, "ppo_lightning"):
        for length in range(1, 6):
            found = steps(torch.tensor([9]), torch.tensor([length]), length + 1)
            assert found.tolist() == [[9, length, 128]]
    reason = "a replay says otherwise" if wrong else "operation not permitted when stream is captur"
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert "C++" not in caplog.text
    assert recorder.recorded == int(wrong)
    assert recorder.replayed == int(wrong)


def test_an_error_of_the_model_is_not_hidden():
    def step(*_):
        raise ValueError("a fault of its own")

    with pytest.raises(ValueError, match="of its own"):
        StepGraphs(step, 1, 9, CPU, Recorder())(torch.tensor([1]), torch.tensor([1]), 2)


def test_hooks_and_weights_elsewhere_keep_a_model_from_being_recorded(tiny_gpt2_dir):
    model = load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir)))
    assert is_whole_on(model, CPU)
    assert not can_be_recorded(model, CPU)
    assert not is_whole_on(model, torch.device("cuda:0"))
    hook = model.transformer.h[0].register_forward_pre_hook(lambda *_: None)
    assert not is_whole_on(model, CPU)
    hook.remove()
    assert is_whole_on(model, CPU)
    block = model.transformer.h[1]
    block.forward = block.forward  # as offloading puts its own there
    assert not is_whole_on(model, CPU)


def answers(folder, *, cuda_graphs=True, device="cpu", **sampling):
    model = load_causal_lm(PolicyConfig(path=str(folder))).to(device)
    return NativeEngine(cuda_graphs=cuda_graphs).generate(
        model,
        prompt_batch(PROMPTS).to(device),
        sampling=SamplingConfig(**{"max_new_tokens": 12, **sampling}),
        stops=StopRules(end_ids=ENDS, pad_id=0, decoder=Letters()),
        policy_version=3,
    )


@pytest.mark.parametrize(("size", "temperature"), [(None, 1.0), (3, 0.6)])
def test_responses_are_those_of_plain_steps(tiny_model_dir, monkeypatch, size, temperature):
    """At any temperature: what is recorded ends with the logits."""
    plain = answers(tiny_model_dir, batch_size=size, temperature=temperature)
    recorder = Recorder()
    monkeypatch.setattr(slots, "can_be_recorded", is_whole_on)
    monkeypatch.setattr(slots, "cuda_capture", lambda: recorder)
    monkeypatch.setattr(graphs, "COLUMNS", 8)
    found = answers(tiny_model_dir, batch_size=size, temperature=temperature)
    assert recorder.recorded >= 1
    assert recorder.replayed > recorder.recorded
    assert_same(found, plain)
    monkeypatch.setattr(slots, "cuda_capture", lambda: pytest.fail("graphs are switched off"))
    unrecorded = {"cuda_graphs": False, "temperature": temperature}
    assert_same(answers(tiny_model_dir, batch_size=size, **unrecorded), plain)


def test_memory_is_free_as_soon_as_the_decoder_is_gone(tiny_gpt2_dir, monkeypatch):
    import gc
    import weakref

    monkeypatch.setattr(slots, "can_be_recorded", is_whole_on)
    # Unlike `Recorder`, and like a graph, what replays knows nothing of the function.
    monkeypatch.setattr(slots, "cuda_capture", lambda: lambda _: lambda: None)
    model = load_causal_lm(PolicyConfig(path=str(tiny_gpt2_dir)))
    decoder = slots.SlotDecoder(
        model,
        prompt_batch(PROMPTS),
        sampling=SamplingConfig(max_new_tokens=9),
        stops=StopRules(end_ids=(), pad_id=0),
        greedy=True,
    )
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            decoder.run()
        memory = weakref.ref(decoder.memory)
        del decoder
        assert memory() is None
    finally:
        gc.enable()


class Distant(torch.Tensor):
    """A tensor that the host cannot look into without waiting; results are such, too."""

    waits: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        looks = ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero", "unique", "cpu")
        masks = [x for x in args if isinstance(x, torch.Tensor)][1:] if "item" in name else []
        if name in looks or any(mask.dtype == torch.bool for mask in masks):
            cls.waits.append(name)
        found = super().__torch_function__(function, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if name == "cpu" else found


@pytest.mark.parametrize("settings", [{}, {"batch_size": 2}, {"min_new_tokens": 3, "top_k": 5}])
def test_a_step_waits_for_the_device_once(tiny_model_dir, monkeypatch, settings):
    expected = answers(tiny_model_dir, **settings)
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir))).eval()
    batch = prompt_batch(PROMPTS)
    far = {n: p.as_subclass(Distant) for n, p in vars(batch).items() if torch.is_tensor(p)}
    batch = type(batch)(**{**vars(batch), **far})
    for place in (slots, slots.read_prompts.__globals__):
        put = monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr
        put(place, "sent", lambda values, _: values.clone().as_subclass(Distant))
    sampling = SamplingConfig(**{"max_new_tokens": 12, **settings})
    stops = StopRules(end_ids=ENDS, pad_id=0)
    decoder = slots.SlotDecoder(model, batch, sampling=sampling, stops=stops, greedy=False)
    writes = []
    write = decoder._write
    monkeypatch.setattr(decoder, "_write", lambda *given: writes.append(1) or write(*given))
    Distant.waits.clear()
    with torch.no_grad():
        found = decoder.run()
    assert Distant.waits == ["cpu"] * len(writes)
    width = expected.response_ids.shape[1]
    assert found.ids[:, :width].tolist() == expected.response_ids.tolist()


@pytest.mark.gpu
def test_on_a_gpu_graphs_say_what_plain_steps_say(tiny_model_dir, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "COLUMNS", 8)
    plain = answers(tiny_model_dir, device="cuda", cuda_graphs=False)
    with caplog.at_level(logging.WARNING, "ppo_lightning"):
        found = answers(tiny_model_dir, device="cuda")
    assert not caplog.records  # it did not give up
    assert_same(found, plain)
    assert_close(found.sampler_logprobs, plain.sampler_logprobs, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_step_synchronises_once(tiny_model_dir, recwarn):
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir))).to("cuda")
    decoder = slots.SlotDecoder(
        model,
        prompt_batch(PROMPTS).to("cuda"),
        sampling=SamplingConfig(max_new_tokens=12),
        stops=StopRules(end_ids=(), pad_id=0),
        greedy=False,
        cuda_graphs=False,
    )
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with torch.no_grad():
            decoder.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in recwarn if "synchroniz" in str(w.message)]) == 12
