"""The recommended set, laid over a config of one's own."""

from itertools import pairwise

import yaml

from ppo_lightning.cli.config_files import shipped_configs
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import run_cli, tiny_config, write_config

NAMES = [
    "ValueWarmup",
    "AdaptiveKL",
    "MaxKL",
    "EntropyTarget",
    "BufferScheduler",
    "CheckpointRollback",
]


def test_it_runs_over_a_config_and_keeps_its_callbacks(tiny_llama_dir, tmp_path, monkeypatch):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config["trainer"]["max_epochs"] = 4
    config["trainer"]["callbacks"] = [{"class_path": "ppo_lightning.callbacks.ActorEMA"}]
    path = write_config(tmp_path / "mine.yaml", config)
    options = ["--config", path, "--config", "ppo-lightning:stable"]
    quiet = ["--model.guards.advice", "off"]  # a tiny model has much to be warned of
    assert run_cli(monkeypatch, "fit", *options, *quiet) == 0
    (saved,) = (tmp_path / "run").rglob("config.yaml")
    callbacks = yaml.safe_load(saved.read_text(encoding="utf-8"))["trainer"]["callbacks"]
    assert [c["class_path"].rpartition(".")[2] for c in callbacks] == ["ActorEMA", *NAMES]
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    stats = read_metrics(metrics)
    assert [s.policy_loss is None for s in stats] == [True, True, False, False]  # value warm-up
    # The first iteration with an actor was the third; its KL, below the target, lowered β.
    assert [s.kl_coef for s in stats[:3]] == [0.05] * 3
    assert 0.049 < stats[3].kl_coef < 0.05


def test_every_line_gives_its_reason():
    lines = shipped_configs()["stable"].read_text(encoding="utf-8").splitlines()
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("trainer:")) :]
    for before, line in pairwise(body):
        if not line.rstrip().endswith(":"):
            assert "#" in line or "#" in before, line
