"""What is kept elsewhere, or in few bits, in the estimate of a run on a GPU."""

import sys
from dataclasses import replace

import pytest
import torch

from ppo_lightning.configs import LoraConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from ppo_lightning.estimate import RewardModel, estimate
from ppo_lightning.models import load_causal_lm
from tests.unit.estimate.test_memory import BESIDE, counted, loaded, run_of

STATES = "optimiser states"


def parts(run):
    return {stage.name: dict(stage.parts) for stage in estimate(run).stages}


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_offloaded_states_are_taken_off_a_gpu_and_nothing_else(tiny_llama_dir, name):
    plain = parts(run_of(tiny_llama_dir, device="cuda", optimizer=OptimizerConfig(name=name)))
    options = OptimizerConfig(name=name, offload=True)
    found = parts(run_of(tiny_llama_dir, device="cuda", optimizer=options))
    assert all(stage.pop(STATES) > 0 for stage in plain.values())
    assert found == plain


def test_on_a_cpu_they_stay_where_they_were(tiny_llama_dir):
    plain = parts(run_of(tiny_llama_dir))
    assert parts(run_of(tiny_llama_dir, optimizer=OptimizerConfig(offload=True))) == plain


def quantised(folder, quantization, **settings):
    run = run_of(folder, lora=LoraConfig(rank=2), device="cuda", **settings)
    return replace(run, policy=replace(run.policy, quantization=quantization))


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("nf4", 4)])
def test_a_quantised_base_is_counted_without_a_package(
    tiny_llama_dir, monkeypatch, quantization, bits
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    plain = parts(quantised(tiny_llama_dir, None))["load"]
    found = parts(quantised(tiny_llama_dir, quantization))["load"]
    policy = PolicyConfig(path=str(tiny_llama_dir))
    linear = [m.weight for m in trunk_of(policy).modules() if isinstance(m, torch.nn.Linear)]
    if quantization == "int8":
        scales = sum(4 * weight.shape[0] for weight in linear)
    else:
        scales = sum(4 * -(-weight.numel() // 64) for weight in linear)
    smaller = sum(weight.numel() * (32 - bits) // 8 for weight in linear) - scales
    assert plain["actor"] - found["actor"] == smaller
    assert {k: v for k, v in found.items() if k != "actor"} == {
        k: v for k, v in plain.items() if k != "actor"
    }


def trunk_of(policy):
    return load_causal_lm(policy).base_model


def test_what_is_counted_of_a_quantised_run_is_what_it_takes(tiny_llama_dir):
    run = replace(quantised(tiny_llama_dir, "int8"), device="cpu")
    networks, found = loaded(run), parts(run)
    actor = networks.trained.actor
    assert found["load"]["actor"] == sum(t.nbytes for t in [*actor.parameters(), *actor.buffers()])
    peaks = counted(run, networks)
    for stage in ("scoring", "update"):
        expected = sum(size for kind, size in found[stage].items() if kind not in BESIDE)
        assert expected == pytest.approx(peaks[stage], rel=0.05)


def test_a_reference_elsewhere_takes_nothing_of_the_gpu(tiny_llama_dir):
    plain = parts(run_of(tiny_llama_dir, device="cuda"))
    away = run_of(tiny_llama_dir, device="cuda", reference=ReferenceConfig(device="cpu"))
    found = parts(away)
    assert all(stage.pop("reference") > 0 for stage in plain.values())
    assert found == plain
    here = replace(away, device="cpu")
    assert parts(here)["load"]["reference"] > 0


def test_a_quantised_reference_and_reward_model(tiny_llama_dir, tiny_reward_dir):
    for quantization in ("int8", "nf4"):
        rewards = (
            RewardModel(name="rm", path=str(tiny_reward_dir), quantization=quantization),
            RewardModel(name="plain", path=str(tiny_reward_dir)),
        )
        reference = ReferenceConfig(quantization=quantization)
        found = parts(run_of(tiny_llama_dir, reference=reference, rewards=rewards))["load"]
        assert found["reference"] < 0.7 * found["actor"]
        alone = parts(run_of(tiny_llama_dir, rewards=rewards[1:]))["load"]
        assert found["reward models"] < 1.7 * alone["reward models"]
