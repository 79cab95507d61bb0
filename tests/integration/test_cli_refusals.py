"""What the command line refuses only when everything is put together, and how it says so."""

import pytest
import torch

from tests.helpers.cli import changed, run_cli, tiny_config, write_config

ARGS = "model.init_args"


@pytest.fixture
def config(tiny_llama_dir, tmp_path):
    return tiny_config(tiny_llama_dir, tmp_path / "run")


def run(monkeypatch, tmp_path, command, config, *arguments):
    path = write_config(tmp_path / "c.yaml", config)
    return run_cli(monkeypatch, command, "--config", path, *arguments)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (f"{ARGS}.policy.lora", {"layers": 9}, f"in `{ARGS}.policy`: `lora.layers` must be at mos"),
        (f"{ARGS}.optimizer", {"name": "LBFGS"}, f"in `{ARGS}`: `optimizer.name`: 'LBFGS' cannot"),
        ("trainer.limit_train_batches", 1, "`trainer.limit_train_batches` cannot be used with"),
    ],
)
def test_what_is_found_late_has_its_place_in_the_file(
    monkeypatch, tmp_path, config, capsys, key, value, said
):
    assert run(monkeypatch, tmp_path, "fit", changed(config, key, value)) == 2
    text = capsys.readouterr().err
    assert f"ppo-lightning: {tmp_path}/c.yaml:" in text
    assert f": {said}" in text


def monitoring(config, monitor, kind="EarlyStopping"):
    callback = {
        "class_path": f"lightning.pytorch.callbacks.{kind}",
        "init_args": {"monitor": monitor},
    }
    return changed(config, "trainer.callbacks", [callback])


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
@pytest.mark.parametrize(
    ("monitor", "said"),
    [
        ("val/score", "did you mean `val/greedy/score`?"),
        ("val/greedy/gold", "There are val/greedy/score, "),
        ("rollout/reward/lenght/raw", "did you mean `rollout/reward/length/raw`?"),
    ],
)
def test_a_metric_that_is_not_logged_is_refused_before_models_load(
    monkeypatch, tmp_path, config, capsys, kind, monitor, said
):
    config = changed(config, f"{ARGS}.policy.lora", {"layers": 9})  # found when it is loaded
    assert run(monkeypatch, tmp_path, "fit", monitoring(config, monitor, kind)) == 2
    text = capsys.readouterr().err
    assert f"{kind} watches `monitor: {monitor}`, which this run does not log" in text
    assert said in text


def test_without_held_out_prompts_none_of_their_metrics_can_be_watched(
    monkeypatch, tmp_path, config, capsys
):
    assert run(monkeypatch, tmp_path, "fit", monitoring(config, "val/greedy/score")) == 0
    capsys.readouterr()
    config = changed(config, "data.init_args.val_prompts", ...)
    assert run(monkeypatch, tmp_path, "fit", monitoring(config, "val/greedy/score")) == 2
    assert "set `data.init_args.val_prompts`" in capsys.readouterr().err


def test_barebones_runs_without_our_defaults_in_its_way(monkeypatch, tmp_path, config):
    with pytest.warns(UserWarning, match="barebones"):
        assert run(monkeypatch, tmp_path, "fit", config, "--trainer.barebones=true") == 0


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_checkpoints_of_others_end_before_models_load(
    monkeypatch, tmp_path, config, capsys, command
):
    torch.save({"a": 1}, tmp_path / "x.ckpt")
    arguments = ["--ckpt_path", tmp_path / "x.ckpt"]
    assert run(monkeypatch, tmp_path, command, config, *arguments) == 2
    text = capsys.readouterr().err
    assert f"`ckpt_path`: `{tmp_path}/x.ckpt` is not a checkpoint of Lightning" in text
    assert "Loading weights" not in text


def test_a_reward_that_leaves_the_process_is_named(monkeypatch, tmp_path, config, capsys):
    script = tmp_path / "leaving.py"
    script.write_text("import sys\ndef score(responses):\n    sys.exit(3)\n", encoding="utf-8")
    component = {
        "class_path": "ppo_lightning.rewards.FunctionReward",
        "init_args": {"function": f"{script}:score"},
    }
    for text in (script.read_text(encoding="utf-8"), "import sys\nsys.exit(3)\n"):
        script.write_text(text, encoding="utf-8")
        wrong = changed(config, f"{ARGS}.rewards.0.component", component)
        assert run(monkeypatch, tmp_path, "fit", wrong) == 2
        said = capsys.readouterr().err
        assert "reward `length`: " in said
        assert "SystemExit: 3" in said
