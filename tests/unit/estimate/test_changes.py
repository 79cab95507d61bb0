"""The cheapest changes that make a run fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ppo_lightning.configs import (
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    PPOConfig,
    ReferenceConfig,
)
from ppo_lightning.estimate.changes import STEPS, find_fit
from ppo_lightning.estimate.run import RewardModel, Run

RUN = Run(
    policy=PolicyConfig(path="x"), prompt_tokens=32, rewards=(RewardModel(name="rm", path="y"),)
)
WHOLE = 16 * (32 + 64)  # a quarter of 64 responses


def peak(run):
    """1000 with nothing done; what each change takes off is easy to tell apart."""
    tokens = run.ppo.microbatch_tokens or WHOLE
    size = 400 * tokens / WHOLE + 600
    size -= 300 * run.policy.gradient_checkpointing * tokens / WHOLE
    size -= 100 * (run.reference.dtype == "bfloat16")
    size -= 250 * (run.policy.lora is not None)
    return SimpleNamespace(peak=SimpleNamespace(total=int(size)))


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        (800, {"model.init_args.ppo.microbatch_tokens": str(WHOLE // 2)}),
        (700, {"model.init_args.ppo.microbatch_tokens": str(WHOLE // 4)}),
        (
            520,
            {
                "model.init_args.ppo.microbatch_tokens": "96",
                "model.init_args.reference.dtype": "bfloat16",
            },
        ),
    ],
)  # fmt: skip
def test_cheap_changes_come_first_and_needless_ones_are_left_out(limit, settings):
    found = find_fit(RUN, limit, peak)
    merged = {k: v for change in found.together for k, v in change.settings.items()}
    assert {k: v for k, v in merged.items() if k in settings} == settings
    assert found.total <= limit
    assert not any("lora" in key for key in merged)


def test_a_dear_change_that_is_enough_makes_cheap_ones_needless():
    def only_adapters(run):
        small = run.ppo.microbatch_tokens is not None
        total = 100 if run.policy.lora is not None else 1000 - 10 * small
        return SimpleNamespace(peak=SimpleNamespace(total=total))

    found = find_fit(RUN, 500, only_adapters)
    assert [list(change.settings) for change in found.together] == [["model.init_args.policy.lora"]]


def test_each_saving_is_that_of_the_change_alone():
    alone = {
        key: saved
        for change, saved in find_fit(RUN, 800, peak).alone
        for key in change.settings
    }  # fmt: skip
    assert alone["model.init_args.policy.gradient_checkpointing"] == 300
    assert alone["model.init_args.reference.dtype"] == 100
    assert alone["model.init_args.sampling.batch_size"] == 0


def test_where_nothing_is_enough_that_is_said():
    found = find_fit(RUN, 1, peak)
    assert found.together is None
    assert 1 < found.total < 600


def test_what_is_done_already_is_no_change():
    run = Run(
        policy=PolicyConfig(path="x", lora=LoraConfig(), dtype="bfloat16", quantization="nf4"),
        prompt_tokens=32,
        ppo=PPOConfig(microbatch_tokens=96),
        reference=ReferenceConfig(dtype="bfloat16", quantization="int8"),
        precision="bf16-mixed",
        mapped=True,
    )
    offered = [change for step in STEPS if (change := step(run))]
    keys = {key for change in offered for key in change.settings}
    assert keys == {
        "model.init_args.sampling.batch_size",
        "model.init_args.policy.gradient_checkpointing",
        "model.init_args.critic_model.gradient_checkpointing",
        "model.init_args.critic_model.kind",
        "model.init_args.critic_model.path",
    }


def test_states_of_frozen_blocks_can_be_done_without():
    def offered(lora):
        run = Run(policy=PolicyConfig(path="x", lora=lora), prompt_tokens=32)
        return {key for step in STEPS if (change := step(run)) for key in change.settings}

    key = "model.init_args.policy.cache_frozen_trunk"
    assert key in offered(LoraConfig(layers=2))
    assert key not in offered(LoraConfig()) | offered(None)


def test_no_change_but_for_the_run_it_names():
    for change in filter(None, (step(RUN) for step in STEPS)):
        assert change.run != RUN
        assert change.price


@pytest.mark.parametrize(
    ("device", "optimizer", "offered"),
    [
        ("cuda", OptimizerConfig(), True),
        ("cuda", OptimizerConfig(offload=True), False),
        ("cuda", OptimizerConfig(name="SGD"), False),
        ("cpu", OptimizerConfig(), False),
    ],
)
def test_states_are_offloaded_from_a_gpu(device, optimizer, offered):
    run = replace(RUN, device=device, optimizer=optimizer)
    keys = {key for step in STEPS if (change := step(run)) for key in change.settings}
    assert ("model.init_args.optimizer.offload" in keys) == offered


@pytest.mark.parametrize("lora", [None, LoraConfig()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_that_compiles_is_not_told_what_does_not_go_with_it(lora, device):
    policy = PolicyConfig(path="x", compile=True, lora=lora)
    changes = [step(replace(RUN, policy=policy, device=device)) for step in STEPS]
    assert not any("quantization" in key for c in changes if c for key in c.settings
                   if "policy" in key)  # fmt: skip


def test_a_reference_that_is_the_actors_base_takes_nothing_that_could_be_saved():
    policy = PolicyConfig(path="x", lora=LoraConfig(), quantization="nf4")
    run = replace(RUN, policy=policy, reference=ReferenceConfig(quantization="nf4"), device="cuda")
    keys = [key for step in STEPS if (change := step(run)) for key in change.settings]
    assert not any("reference" in key for key in keys)


def test_a_shared_critic_is_told_without_what_a_separate_one_has():
    critic = CriticConfig(gradient_checkpointing=True)
    changes = [step(replace(RUN, critic_model=critic)) for step in STEPS]
    key = "model.init_args.critic_model.{}".format
    (shared,) = (c.settings for c in changes if c and c.settings.get(key("kind")) == "shared")
    assert shared[key("gradient_checkpointing")] == "false"
