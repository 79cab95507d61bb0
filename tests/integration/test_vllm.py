"""Whole iterations that are sampled by the double of vLLM."""

import pytest

from ppo_lightning.cli.main import main
from ppo_lightning.configs import GuardConfig, LoraConfig, ValidationConfig
from ppo_lightning.errors import RolloutError
from ppo_lightning.rollout import VLLMEngine
from tests.helpers import vllm_double
from tests.helpers.runs import data_module, fit, ppo_module


@pytest.fixture(autouse=True)
def started(monkeypatch):
    return vllm_double.install(monkeypatch)


def test_every_iteration_is_sampled_from_the_weights_of_the_moment(
    tiny_llama_dir, tmp_path, started
):
    module = ppo_module(tiny_llama_dir, engine=VLLMEngine())
    seen = fit(tmp_path, module, data_module(), max_epochs=2)
    assert all(stats.sampler_mismatch < 1e-5 for stats in seen.stats)
    assert [c.rollout.policy_version for c in seen.collected] == [0, seen.stats[0].steps_taken]
    assert len(started[0].loads) == 2


def test_of_a_run_with_an_adapter_the_rest_is_sent_once(tiny_llama_dir, tmp_path, started):
    policy = {"lora": LoraConfig(rank=2), "dtype": "bfloat16"}
    critic = {"dtype": "float32"}
    module = ppo_module(tiny_llama_dir, engine=VLLMEngine(), policy=policy, critic_model=critic)
    seen = fit(tmp_path, module, data_module(), max_epochs=2)
    assert all(stats.sampler_mismatch < 0.02 for stats in seen.stats)
    (llm,) = started
    assert (len(llm.loads), len(llm.adapter_loads)) == (1, 2)


def test_held_out_answers_are_of_the_policy_and_of_the_reference(tiny_llama_dir, tmp_path, started):
    module = ppo_module(
        tiny_llama_dir,
        engine=VLLMEngine(),
        validation=ValidationConfig(greedy=True, num_samples=0),
    )
    data = data_module(val_prompts=["the cat", "a dog ran"])
    seen = fit(tmp_path, module, data, max_epochs=1, num_sanity_val_steps=0)
    assert seen.answers
    assert all(stats.sampler_mismatch < 1e-5 for stats in seen.stats)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_an_engine_that_dies_ends_the_run_and_a_new_one_goes_on(tiny_llama_dir, tmp_path, started):
    class Dying(VLLMEngine):
        def generate(self, *args, policy_version, **options):
            if policy_version:
                started[0].faults.dead = True
            return super().generate(*args, policy_version=policy_version, **options)

    settings = {"guards": GuardConfig(advice="off")}
    module = ppo_module(tiny_llama_dir, engine=Dying(), **settings)
    run = {"max_epochs": 2, "enable_checkpointing": True}
    with pytest.raises(RolloutError, match=r"could not .*EngineDeadError.*`--ckpt_path last`"):
        fit(tmp_path, module, data_module(), **run)
    (last,) = tmp_path.rglob("last.ckpt")
    module = ppo_module(tiny_llama_dir, engine=VLLMEngine(), **settings)
    seen = fit(tmp_path, module, data_module(), ckpt=last, **run)
    assert [stats.iteration for stats in seen.stats] == [1]


def test_the_command_line_takes_it_by_class_path(tmp_path, capsys):
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: {class_path: ppo_lightning.modules.PPOModule, init_args: {engine: {class_path: "
        "ppo_lightning.rollout.VLLMEngine, init_args: {sleep_level: 2, dtype: bfloat16}}}}\n"
    )
    config = ["--config", "ppo-lightning:quickstart", "--config", str(file)]
    assert main(["fit", *config, "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert "sleep_level: 2" in printed
    assert "timeout_s: 1800.0" in printed
