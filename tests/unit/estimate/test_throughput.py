"""Seconds of an iteration, by hand."""

from dataclasses import replace

import pytest

from ppo_lightning.configs import CriticConfig, LoraConfig, PolicyConfig
from ppo_lightning.estimate import Hardware, Strategy, Traffic
from ppo_lightning.estimate.throughput import (
    decode_step_seconds,
    scoring_flops,
    seconds,
    training_flops,
)
from ppo_lightning.estimate.work import work_of
from tests.unit.estimate.test_traffic import RUN, SIZES

# A machine whose numbers are easy: a second is 10,000 operations, 500 bytes of memory, 100 sent.
SLOW = Hardware(
    flops=1e9,
    flops_float32=20_000,
    memory_bandwidth=1000,
    node_bandwidth=200,
    network_bandwidth=200,
    latency=1,
    flops_share=0.5,
    memory_bandwidth_share=0.5,
    network_share=0.5,
)


def told(run, sent=None, sizes=SIZES):
    return seconds(run, sizes, work_of(run), sent or Traffic(), SLOW, kv_bytes=2)


def test_operations_of_a_token():
    assert training_flops(10, 3, trained=True, recomputed=False) == 180
    assert training_flops(10, 3, trained=True, recomputed=True) == 240
    assert training_flops(10, 3, trained=False, recomputed=False) == 120
    assert scoring_flops(10, 3) == 60


def test_decoding_waits_for_the_memory_or_for_the_products():
    few = decode_step_seconds(
        weights=1000, parameters=250, cache=50, rows=1, flops=1000, memory_bandwidth=100
    )
    assert few == 10 + 0.5
    many = decode_step_seconds(
        weights=1000, parameters=250, cache=50, rows=40, flops=1000, memory_bandwidth=100
    )
    assert many == 20 + 0.5


def test_stages_by_hand():
    found = told(RUN)
    # 4 rows of 8 and 12 tokens: 32 tokens of prompts; a step reads 1,000 bytes of weights and keys
    # and values of 4 x 14 tokens.
    assert found.rollout == pytest.approx(2 * 250 * 32 / 10_000 + 12 * (2 + 4 * 14 * 2 / 500))
    assert found.scoring == pytest.approx(3 * 2 * 250 * 80 / 10_000)
    assert found.update == pytest.approx(3 * 2 * 6 * 250 * 80 / 10_000)
    assert found.total == found.rollout + found.scoring + found.update


def test_what_travels_counts_where_it_takes_longer_than_the_products():
    base = told(RUN)
    sent = Traffic(rollout=100, scoring=100, update=100_000)
    found = told(RUN, sent)
    assert found.rollout == pytest.approx(base.rollout + 1)
    assert found.scoring == base.scoring  # hidden behind 12 s of products
    assert found.update == 1000


def test_each_knob_of_the_run_is_in_it():
    base = told(RUN)
    again = replace(
        RUN,
        policy=PolicyConfig(path="x", gradient_checkpointing=True),
        critic_model=CriticConfig(gradient_checkpointing=True),
    )
    assert told(again).update == pytest.approx(base.update * 8 / 6)
    adapted = replace(RUN, policy=PolicyConfig(path="x", lora=LoraConfig()))
    assert told(adapted).update == pytest.approx(base.update * 10 / 12)
    half = replace(RUN, precision="bf16-mixed")
    assert told(half).update == pytest.approx(base.update * 20_000 / 1e9)
    extra = replace(RUN, ppo=replace(RUN.ppo, extra_critic_epochs=3))
    assert told(extra).update == pytest.approx(base.update * 1.5)
    shared = told(RUN, sizes=replace(SIZES, critic=None))
    assert shared.update == pytest.approx(base.update / 2)
    waves = replace(RUN, sampling=replace(RUN.sampling, batch_size=1))
    assert told(waves).rollout == pytest.approx(2 * 250 * 32 / 10_000 + 4 * 12 * (2 + 14 * 2 / 500))
    judged = told(RUN, sizes=replace(SIZES, rewards=(SIZES.actor,)))
    assert judged.scoring == pytest.approx(base.scoring * 4 / 3)


def test_ranks_that_share_a_layer_wait_for_each_other():
    run = replace(RUN, strategy=Strategy(kind="fsdp", tensor=2))
    sent = Traffic(tensor_rollout=100, tensor_scoring=200, tensor_update=300)
    base, found = told(run), told(run, sent)
    assert found.rollout == pytest.approx(base.rollout + 1)
    assert found.scoring == pytest.approx(base.scoring + 2)
    assert found.update == pytest.approx(base.update + 3)
    # Two sums in each of four blocks, at one second each, for every token and every scoring pass.
    alone = told(replace(run, strategy=Strategy(kind="fsdp"), ranks=2))
    assert base.rollout == pytest.approx(alone.rollout + 12 * 8)
    assert base.scoring == pytest.approx(alone.scoring + 8 * 3 * 8)
