"""Every config that is shipped can be read; the asynchronous one runs as its head says."""

import pytest
import yaml

from ppo_lightning.cli.config_files import shipped_configs
from ppo_lightning.metrics import read_metrics
from tests.helpers.cli import run_cli, tiny_config, write_config
from tests.helpers.sampling_process import fork_samplers

SHIPPED = {name: path for name, path in shipped_configs().items() if "/" in name}


@pytest.mark.parametrize("name", SHIPPED)
def test_it_can_be_read(name, tiny_llama_dir, tmp_path, monkeypatch, capsys):
    """By itself, or over a config of one's own where it names no data."""
    text = SHIPPED[name].read_text(encoding="utf-8")
    assert text.startswith("# ")
    below = []
    if "data" not in yaml.safe_load(text):
        path = write_config(tmp_path / "mine.yaml", tiny_config(tiny_llama_dir, tmp_path))
        below = ["--config", path]
    options = [*below, "--config", f"ppo-lightning:{name}", "--print_config"]
    assert run_cli(monkeypatch, "fit", *options) == 0, capsys.readouterr().err
    written = yaml.safe_load(capsys.readouterr().out)
    assert written["data"]["class_path"]


def test_t11_the_asynchronous_one_is_one_update_late(tiny_llama_dir, tmp_path, monkeypatch):
    fork_samplers(monkeypatch)
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config["trainer"]["max_epochs"] = 3
    options = ["--config", write_config(tmp_path / "mine.yaml", config)]
    options += ["--config", "ppo-lightning:asynchronous"]
    assert run_cli(monkeypatch, "fit", *options) == 0
    (metrics,) = (tmp_path / "run").rglob("metrics.jsonl")
    stats = read_metrics(metrics)
    assert [s.lag_max for s in stats] == [0, 1, 1]
    weights = [s.importance_mean for s in stats[1:]]
    assert all(0.5 < weight < 2 for weight in weights)
