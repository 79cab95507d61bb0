"""The shipped presets: laid under a config that names a model and data, they parse and run."""

import pytest
import yaml

from ppo_lightning.cli.config_files import shipped_configs
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import run_cli, write_config

PRESETS = ("deepspeed_chat", "instructgpt", "summarize", "trl")

# What is easiest to get wrong when a name means something else elsewhere.
TRANSLATED = {
    "deepspeed_chat": {
        "ppo": {"vf_coef": 0.5, "whiten_advantages": False, "num_update_epochs": 1},
        "kl": {"coef": 0.1},
        "actor": {"lr": 9.65e-6, "warmup": 100, "schedule": "cosine"},
        "reward_processing": {"clip": 5.0},
    },
    "instructgpt": {
        "ppo": {"num_update_epochs": 1, "target_kl": None, "gamma": 1.0},
        "kl": {"coef": 0.02},
        "actor": {"warmup": 80, "schedule": "constant"},
        "critic": {"lr": 9e-6, "warmup": 0},
    },
    "summarize": {
        "ppo": {"num_update_epochs": 4, "vf_coef": 0.05, "gae_lambda": 0.95},
        "kl": {"coef": 0.05},
        "actor": {"lr": 1.5e-5, "schedule": "linear", "max_grad_norm": None},
    },
    "trl": {
        "ppo": {"num_update_epochs": 4, "vf_coef": 0.05, "whiten_advantages": True},
        "kl": {"coef": 0.05, "estimator": "k1"},
        "sampling": {"max_new_tokens": 53, "temperature": 0.7},
        "reward_processing": {"clip": None},
        "optimizer": {"eps": 1e-8},
    },
}
MINIBATCHES = {"deepspeed_chat": 1, "instructgpt": 8, "summarize": 1, "trl": 1}


def mine(policy, folder, **data):
    """As little as a config of one's own can say."""
    component = {"class_path": "ppo_lightning.rewards.TargetLengthReward"}
    component["init_args"] = {"target_tokens": 3}
    return {
        "trainer": {"accelerator": "cpu", "default_root_dir": str(folder)},
        "model": {
            "init_args": {
                "policy": {"path": str(policy)},
                "rewards": [{"name": "length", "component": component}],
            }
        },
        "data": {"init_args": {"prompts": ["the cat", "a dog ran", "no"], **data}},
    }


def test_all_are_shipped():
    shipped = shipped_configs()
    assert {name for name in shipped if name.startswith("presets/")} == {
        f"presets/{name}" for name in PRESETS
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_they_parse_and_say_what_was_published(
    monkeypatch, tmp_path, tiny_llama_dir, capsys, preset
):
    path = write_config(tmp_path / "mine.yaml", mine(tiny_llama_dir, tmp_path))
    shipped = f"ppo-lightning:presets/{preset}"
    options = ["fit", "--config", shipped, "--config", path, "--print_config"]
    assert run_cli(monkeypatch, *options) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    settings = printed["model"]["init_args"]
    for block, values in TRANSLATED[preset].items():
        for name, value in values.items():
            assert settings[block][name] == value, (block, name)
    assert settings["policy"]["path"] == str(tiny_llama_dir)
    assert printed["data"]["init_args"]["buffer"]["num_minibatches"] == MINIBATCHES[preset]
    if preset == "instructgpt":
        names = [callback["class_path"].rpartition(".")[2] for callback in callbacks(printed)]
        assert "ActorEMA" in names


def callbacks(printed):
    return printed["trainer"]["callbacks"] or []


@pytest.mark.parametrize("preset", PRESETS)
def test_they_run(monkeypatch, tmp_path, tiny_llama_dir, preset):
    """With the sizes of a tiny model; ``mine.yaml`` has the last word."""
    config = mine(tiny_llama_dir, tmp_path / "run", chat=False, max_prompt_tokens=20)
    config["data"]["init_args"]["buffer"] = {"num_prompts": 8, "num_minibatches": 2}
    config["trainer"] |= {"max_epochs": 1}
    config["model"]["init_args"] |= {
        "sampling": {"max_new_tokens": 4},
        "guards": {"advice": "off"},
    }
    path = write_config(tmp_path / "mine.yaml", config)
    shipped = f"ppo-lightning:presets/{preset}"
    assert run_cli(monkeypatch, "fit", "--config", shipped, "--config", path) == 0
    [metrics] = (tmp_path / "run").rglob("metrics.jsonl")
    [stats] = read_metrics(metrics)
    assert stats.num_responses == 8
    assert stats.steps_taken == 2 * TRANSLATED[preset]["ppo"]["num_update_epochs"]
