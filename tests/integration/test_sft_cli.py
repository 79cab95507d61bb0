"""Supervised fine-tuning from the command line."""

import json

import pytest

from ppo_lightning.metrics import SFTStats, read_step_metrics
from tests.helpers.cli import changed, run_cli, write_config
from tests.helpers.sft_runs import DEMONSTRATIONS, HELD_OUT


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    return {
        "seed_everything": 1,
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": str(tmp_path)},
        "model": {
            "class_path": "ppo_lightning.modules.SFTModule",
            "init_args": {
                "policy": {"path": str(tiny_llama_dir), "lora": {"rank": 4}},
                "actor": {"lr": 1e-2},
                "sampling": {"max_new_tokens": 4},
            },
        },
        "data": {
            "class_path": "ppo_lightning.data.SFTDataModule",
            "init_args": {
                "demonstrations": DEMONSTRATIONS,
                "val_demonstrations": HELD_OUT,
                "batch_size": 4,
            },
        },
    }


def test_fit_validate_test_and_predict(config, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path / "sft.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path) == 0
    run = tmp_path / "lightning_logs" / "version_0"
    rows = read_step_metrics(run / "metrics.jsonl", SFTStats)
    assert [row.step for row in rows] == [1, 2, 2, 3, 4, 4]
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "config.yaml").is_file()
    assert len(list((run / "samples").iterdir())) == 2
    told = capsys.readouterr()
    assert "step 4: held-out loss" in told.err
    last = run / "checkpoints" / "last.ckpt"
    for command in ("validate", "test"):
        assert run_cli(monkeypatch, command, "--config", path, "--ckpt_path", last) == 0
        out = capsys.readouterr().out
        assert f"{rows[-1].val_perplexity:.4g}"[:4] in out
    assert run_cli(monkeypatch, "predict", "--config", path, "--ckpt_path", last) == 0
    (predictions,) = tmp_path.rglob("predictions.jsonl")
    found = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [row["prompt"] for row in found] == [record["prompt"] for record in HELD_OUT]
    capsys.readouterr()
    assert run_cli(monkeypatch, "validate", "--config", path, "--ckpt_path", "last") == 0
    assert f"Taking the weights of `{last}`, after 4 steps." in capsys.readouterr().err
    more = ("--trainer.max_epochs", "3", "--ckpt_path", "last")
    assert run_cli(monkeypatch, "fit", "--config", path, *more) == 0
    assert "after 4 steps" in capsys.readouterr().err


def test_the_exported_model_is_the_next_runs_policy(config, tmp_path, monkeypatch, capsys):
    """By the folder of the run: what SFT leaves behind, the next step takes by one path."""
    path = write_config(tmp_path / "sft.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path) == 0
    again = changed(config, "model.init_args.policy", {"path": str(tmp_path)})
    again["trainer"]["default_root_dir"] = str(tmp_path / "next")
    assert run_cli(monkeypatch, "validate", "--config", write_config(path, again)) == 0
    rows = read_step_metrics(tmp_path / "lightning_logs" / "version_0" / "metrics.jsonl", SFTStats)
    assert f"{rows[-1].val_loss:.4g}"[:4] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.init_args.packin", True, "unknown key `packin`"),
        ("data.init_args.demonstrations", "nothing.jsonl", "nothing.jsonl"),
        ("data.init_args.demonstrations", [{"question": "a"}], "demonstrations[0]"),
        ("data.init_args.val_share", 0.5, "`val_share` takes held-out"),
        ("data.init_args.max_tokens", 4000, "exceeds the 128 positions"),
        ("model.init_args.chat_template", "none.jinja", "`none.jinja` is no file"),
        ("trainer.gradient_clip_val", 1.0, "model.init_args.actor.max_grad_norm"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(
    config, tmp_path, monkeypatch, capsys, key, value, message
):
    path = write_config(tmp_path / "sft.yaml", changed(config, key, value))
    assert run_cli(monkeypatch, "fit", "--config", path) != 0
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_the_shipped_config_can_be_read(monkeypatch, capsys):
    arguments = ("fit", "--config", "ppo-lightning:sft/style", "--print_config")
    assert run_cli(monkeypatch, *arguments) == 0
    assert "SFTDataModule" in capsys.readouterr().out


def test_pairs_are_no_demonstrations(config, tmp_path, monkeypatch, capsys):
    data = {
        "class_path": "ppo_lightning.data.PreferenceDataModule",
        "init_args": {"pairs": [], "batch_size": 4},
    }
    path = write_config(tmp_path / "c.yaml", config | {"data": data})
    assert run_cli(monkeypatch, "fit", "--config", path) == 2
    told = capsys.readouterr().err
    assert "`data.class_path` cannot be PreferenceDataModule with SFTModule: set `ppo_light" in told
    assert not (tmp_path / "lightning_logs").exists()
