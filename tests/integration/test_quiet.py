"""What tells a user nothing is not printed."""

import logging

import pytest

from tests.helpers.cli import run_cli, tiny_config, write_config
from tests.helpers.runs import data_module, ppo_module, trainer


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_callbacks_that_take_the_place_of_lightnings_are_not_announced(
    tiny_llama_dir, tmp_path, caplog
):
    run = trainer(tmp_path, max_epochs=1)
    module, data = ppo_module(tiny_llama_dir), data_module(val_prompts=["no"])
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        run.fit(module, data)
        run.validate(module, data, verbose=False)
    assert "override" not in caplog.text
    assert [c.save_last for c in run.checkpoint_callbacks] == [True]  # ours, once
    names = [type(callback).__name__ for callback in run.callbacks]
    assert len(set(names)) == len(names)


def test_commands_about_a_checkpoint_print_their_result_alone(
    monkeypatch, tiny_llama_dir, tmp_path, capfd
):
    config = write_config(tmp_path / "c.yaml", tiny_config(tiny_llama_dir, tmp_path))
    options = ("--config", config, "--trainer.max_epochs")
    assert run_cli(monkeypatch, "fit", *options, "1") == 0
    # Lightning warns of another folder, and warnings are errors here.
    assert run_cli(monkeypatch, "fit", *options, "2", "--ckpt_path", "last") == 0
    [file] = tmp_path.glob("lightning_logs/version_1/checkpoints/last.ckpt")
    assert run_cli(monkeypatch, "test", "--config", config, "--ckpt_path", file) == 0
    assert "Loading weights" not in capfd.readouterr().err
    assert run_cli(monkeypatch, "sample", file, "--prompt", "hello") == 0
    assert run_cli(monkeypatch, "export", file, tmp_path / "actor") == 0
    assert run_cli(monkeypatch, "sample", tmp_path / "actor", "--prompt", "hello") == 0
    assert capfd.readouterr().err == ""
