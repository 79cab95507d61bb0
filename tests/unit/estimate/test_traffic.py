"""Bytes that a rank sends, by hand and by what torch moves."""

from dataclasses import replace

import pytest
from torch import nn

from ppo_lightning.configs import (
    BufferConfig,
    LoraConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.estimate import NetworkSize, Run, Sizes, Strategy
from ppo_lightning.estimate.traffic import (
    all_gather_bytes,
    all_reduce_bytes,
    pushed_bytes,
    reduce_scatter_bytes,
    traffic,
)
from ppo_lightning.estimate.work import work_of
from tests.helpers.processes import run_on_ranks

ACTOR = NetworkSize(
    parameters=250,
    weights=1000,
    block=200,
    rest=200,
    trained=1000,
    trained_block=200,
    trained_rest=200,
    blocks=4,
    hidden=16,
)
SIZES = Sizes(actor=ACTOR, critic=replace(ACTOR, weights=800, trained=800, rest=0), reference=ACTOR)

# 16 responses on 4 ranks: 4 each, 2 minibatches of 2, microbatches of one row of 20 tokens.
RUN = Run(
    policy=PolicyConfig(path="x"),
    prompt_tokens=8,
    sampling=SamplingConfig(max_new_tokens=12),
    ppo=PPOConfig(num_update_epochs=3, microbatch_tokens=20),
    buffer=BufferConfig(num_prompts=16, num_minibatches=2),
    device="cuda",
    ranks=4,
    strategy=Strategy(kind="fsdp"),
)


def sent(run, **options):
    return traffic(run, SIZES, work_of(run), **options)


def test_collectives_around_a_ring():
    assert all_gather_bytes(1000, 4) == 750
    assert reduce_scatter_bytes(1000, 4) == 750
    assert all_reduce_bytes(1000, 4) == 1500
    assert all_reduce_bytes(1000, 1) == 0


def test_work_by_hand():
    work = work_of(RUN)
    assert (work.responses, work.tokens, work.at_once, work.waves) == (4, 80, 4, 1)
    assert (work.epochs, work.steps, work.microbatches, work.scoring_passes) == (3, 2, 2, 4)
    few = replace(RUN, sampling=SamplingConfig(max_new_tokens=12, batch_size=3))
    assert work_of(few).waves == 2
    whole = replace(RUN, ppo=PPOConfig())
    assert (work_of(whole).microbatches, work_of(whole).scoring_passes) == (1, 1)


def test_fsdp_gathers_twice_a_microbatch_and_scatters_gradients():
    found = sent(RUN)
    assert found.rollout == 750
    assert found.scoring == 4 * 0.75 * (1000 + 800 + 1000)
    # 3 epochs of 2 steps of 2 microbatches.
    assert found.update == 12 * 0.75 * (2 * 1000 + 2 * 800 + 1000 + 800)
    assert found.total == found.rollout + found.scoring + found.update


def test_ddp_adds_gradients_up_for_each_minibatch():
    found = sent(replace(RUN, strategy=Strategy(kind="ddp")))
    assert (found.rollout, found.scoring) == (0, 0)
    assert found.update == 6 * 2 * 0.75 * 1800


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_gathers_new_weights_after_a_step(stage):
    found = sent(replace(RUN, strategy=Strategy(kind="deepspeed", stage=stage)))
    assert found.update == 12 * 0.75 * 1800 + 6 * 0.75 * 1800


def test_one_process_sends_nothing():
    assert sent(replace(RUN, ranks=1, strategy=Strategy())).total == 0
    assert sent(replace(RUN, ranks=1)).total == 0


def test_extra_passes_of_the_critic_are_its_own():
    more = replace(RUN, ppo=replace(RUN.ppo, extra_critic_epochs=1))
    assert sent(more).update - sent(RUN).update == 4 * 0.75 * (2 * 800 + 800)


def test_tensor_parallel_sums_states_twice_a_block():
    run = replace(RUN, strategy=Strategy(kind="fsdp", tensor=2))
    # 8 responses of 20 tokens on each of two groups; states of 16 numbers of 4 bytes.
    one_pass = 2 * 4 * (8 * 20 * 16 * 4)  # a ring of 2 sends as much as there is
    found = sent(run)
    assert found.tensor_rollout == one_pass
    assert found.tensor_scoring == 3 * one_pass
    assert found.tensor_update == 2 * 2 * 3 * one_pass
    again = replace(run, policy=PolicyConfig(path="x", gradient_checkpointing=True))
    assert sent(again).tensor_update == 3 * 2 * 3 * one_pass
    half = replace(run, precision="bf16-mixed")
    assert sent(half).tensor_rollout == one_pass / 2
    assert found.rollout == 500  # two ranks are left to gather over


def test_a_generator_gets_adapters_alone_where_there_are_some():
    assert sent(RUN).push == 0
    assert sent(RUN, asynchronous=True).push == 1000
    adapted = replace(RUN, policy=PolicyConfig(path="x", lora=LoraConfig()))
    assert pushed_bytes(adapted, replace(ACTOR, trained=10)) == 10
    assert sent(RUN, asynchronous=True).parts["weights to a generator"] == 1000


# ---------------------------------------------------------------------- what torch moves


def _received_by_fsdp2(ranks):
    """What an FSDP2 all-gather brings a rank: the whole less its own shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block = nn.Linear(16, 8, bias=False)
    whole = block.weight.numel() * block.weight.element_size()
    fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)))
    own = block.weight.to_local()
    own = own.numel() * own.element_size()
    block.unshard()
    gathered = block.weight.numel() * block.weight.element_size()
    return whole, gathered - own


def test_as_much_is_counted_as_an_fsdp2_gather_brings():
    for whole, received in run_on_ranks(_received_by_fsdp2, 2, 2):
        assert received == all_gather_bytes(whole, 2) == 256
