"""Decoding in slots: the responses of the plain loop, whatever gets a slot when."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import PolicyConfig, SamplingConfig
from ppo_lightning.models import base_causal_lm, load_causal_lm, reading_of
from ppo_lightning.rollout import NativeEngine, StopRules
from ppo_lightning.rollout.engines import slots as slots_module
from tests.helpers.scripted import Letters, prompt_batch

PROMPTS = [[5, 6, 7, 8], [11, 12], [13], [14, 15, 16], [17, 18, 19, 20, 21, 22], [23, 24]]
ENDS = tuple(range(20, 32))
"""So many end tokens that responses have very different lengths."""


def answers(folder, *, padding_free, prompts=None, ends=ENDS, greedy=False, **sampling):
    model = load_causal_lm(PolicyConfig(path=str(folder), padding_free=padding_free))
    return model, NativeEngine().generate(
        model,
        prompt_batch(PROMPTS) if prompts is None else prompts,
        sampling=SamplingConfig(**{"max_new_tokens": 12, **sampling}),
        stops=StopRules(end_ids=ends, pad_id=0, decoder=Letters()),
        policy_version=3,
        greedy=greedy,
    )


def assert_same(one, other):
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert one.response_mask.tolist() == other.response_mask.tolist()
    assert one.truncated.tolist() == other.truncated.tolist()
    assert_close(one.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("size", [None, 1, 2, 4])
def test_responses_are_those_of_the_plain_loop(tiny_model_dir, size, greedy):
    _, plain = answers(tiny_model_dir, padding_free=False, greedy=greedy)
    model, slots = answers(tiny_model_dir, padding_free=True, greedy=greedy, batch_size=size)
    assert reading_of(model).slots
    assert len({*plain.response_mask.sum(1).tolist()}) > 2
    assert_same(slots, plain)


@pytest.mark.parametrize("size", [None, 2])
def test_stop_strings_least_lengths_and_budgets_hold(tiny_model_dir, size):
    settings = {"min_new_tokens": 4, "stop_strings": ["i", "no", "t"], "max_new_tokens": 6}
    _, plain = answers(tiny_model_dir, padding_free=False, **settings)
    _, slots = answers(tiny_model_dir, padding_free=True, batch_size=size, **settings)
    assert_same(slots, plain)
    assert not torch.isin(slots.response_ids[:, :4], torch.tensor(ENDS)).any()
    assert slots.truncated.any()
    assert not slots.truncated.all()


def test_a_prompt_with_several_responses_is_read_once(tiny_model_dir):
    batch = prompt_batch([prompt for prompt in PROMPTS[:3] for _ in range(3)])
    batch = replace(batch, groups=torch.arange(9) // 3)
    _, plain = answers(tiny_model_dir, padding_free=False, prompts=batch)
    model = load_causal_lm(PolicyConfig(path=str(tiny_model_dir)))
    read: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    slots = NativeEngine().generate(
        model,
        batch,
        sampling=SamplingConfig(max_new_tokens=12),
        stops=StopRules(end_ids=ENDS, pad_id=0),
        policy_version=3,
    )
    assert read[0] == 4 + 2 + 1
    assert len({tuple(ids) for ids in slots.response_ids[:3].tolist()}) > 1
    assert_same(slots, plain)


def passes_of(folder, **sampling):
    """Tokens of each pass that reads prompts, rows of each step, and what came of them."""
    model = load_causal_lm(PolicyConfig(path=str(folder)))
    read: list[int] = []
    steps: list[int] = []

    def count(_, __, inputs):
        (read if "packing" in inputs else steps).append(inputs["input_ids"].numel())

    model.register_forward_pre_hook(count, with_kwargs=True)
    rollout = NativeEngine().generate(
        model,
        prompt_batch(PROMPTS),
        sampling=SamplingConfig(max_new_tokens=12, **sampling),
        stops=StopRules(end_ids=ENDS, pad_id=0),
        policy_version=3,
    )
    return read, steps, rollout


def test_long_prompts_are_read_a_few_at_a_time(tiny_model_dir, monkeypatch):
    whole, _, expected = passes_of(tiny_model_dir)
    assert whole == [18]
    monkeypatch.setattr(slots_module, "PROMPT_TOKENS", 13)
    read, _, parts = passes_of(tiny_model_dir)
    assert read == [6, 4, 8]  # two prompts each: the longest has six tokens
    assert_same(parts, expected)


def test_ended_responses_are_closed_up(tiny_model_dir):
    _, steps, rollout = passes_of(tiny_model_dir)
    lengths = rollout.response_mask.sum(1)
    # The first token of each response comes from reading its prompt.
    assert int((lengths - 1).sum()) <= sum(steps) < int(lengths.max() - 1) * len(PROMPTS)


def test_no_slot_is_idle_while_a_prompt_waits(tiny_model_dir):
    _, steps, rollout = passes_of(tiny_model_dir, batch_size=2)
    assert steps == sorted(steps, reverse=True)  # two slots, then one for the last response
    assert set(steps) <= {1, 2}
    assert sum(steps) == int((rollout.response_mask.sum(1) - 1).sum())


def test_adapters_act_and_the_mode_is_put_back(tiny_llama_dir):
    from ppo_lightning.configs import CriticConfig, LoraConfig
    from ppo_lightning.models import build_actor_critic

    policy = PolicyConfig(path=str(tiny_llama_dir), lora=LoraConfig(rank=4))
    networks = build_actor_critic(policy, CriticConfig(kind="shared")).train()
    with torch.no_grad():
        for name, weight in networks.actor.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    assert reading_of(base_causal_lm(networks.actor)).slots
    rollout = NativeEngine().generate(
        networks.actor,
        prompt_batch(PROMPTS),
        sampling=SamplingConfig(max_new_tokens=6),
        stops=StopRules(end_ids=(), pad_id=0),
        policy_version=0,
    )
    with torch.no_grad():
        scored = networks(rollout.sequences, temperature=1.0).logprobs
    assert_close(rollout.sampler_logprobs, scored, rtol=0, atol=1e-4)
    assert networks.actor.training
