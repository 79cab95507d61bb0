"""A run's folder stands for the model that it has left."""

import logging
import os

import pytest

from ppo_lightning.errors import ModelError
from ppo_lightning.models import load_tokenizer, local_path, runs


@pytest.fixture(autouse=True)
def _untold(monkeypatch):
    monkeypatch.setattr(runs, "_told", set())


def model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def version(run, number):
    return run / "lightning_logs" / f"version_{number}"


def test_the_model_of_a_run_without_versions(tmp_path):
    found = model(tmp_path / "model")
    assert local_path(str(tmp_path)) == str(found)


def test_the_latest_version_with_a_model_counts_as_a_number(tmp_path, caplog):
    model(version(tmp_path, 9) / "model")
    expected = model(version(tmp_path, 10) / "model")
    version(tmp_path, 11).mkdir()  # stopped, or still running
    with caplog.at_level(logging.INFO, logger="ppo_lightning"):
        assert local_path(str(tmp_path)) == str(expected)
        local_path(str(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(expected) in line
    assert "Later runs there have none: version_11." in line


def test_of_many_later_runs_without_a_model_three_are_named(tmp_path, caplog):
    """Each validation and prediction has a version of its own."""
    model(version(tmp_path, 0) / "model")
    for number in range(1, 8):
        version(tmp_path, number).mkdir()
    with caplog.at_level(logging.INFO, logger="ppo_lightning"):
        local_path(str(tmp_path))
    assert "have none: version_7, version_6, version_5 and 4 others." in caplog.text


def test_the_logs_folder_and_one_version_may_be_given_too(tmp_path):
    expected = model(version(tmp_path, 3) / "model")
    assert local_path(str(tmp_path / "lightning_logs")) == str(expected)
    assert local_path(str(version(tmp_path, 3))) == str(expected)


def test_an_exported_model_comes_before_those_of_versions(tmp_path):
    model(version(tmp_path, 3) / "model")
    expected = model(tmp_path / "model")
    assert local_path(str(tmp_path)) == str(expected)


def test_a_newer_model_of_a_version_that_is_passed_over_is_named(tmp_path, caplog):
    """A later run with a logger does not write where an earlier export did."""
    expected, newer = model(tmp_path / "model"), model(version(tmp_path, 0) / "model")
    os.utime(expected / "config.json", (1, 1))
    with caplog.at_level(logging.WARNING, logger="ppo_lightning"):
        assert local_path(str(tmp_path)) == str(expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"`{newer}` is newer" in line


def test_a_models_own_folder_is_never_searched(tmp_path):
    model(tmp_path / "model")
    (tmp_path / "config.json").write_text("{}")
    assert local_path(str(tmp_path)) == str(tmp_path)


def test_a_run_that_was_stopped_names_its_checkpoint_and_the_command(tmp_path):
    checkpoints = version(tmp_path, 0) / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("epoch=0.ckpt", "last.ckpt"):
        (checkpoints / name).write_bytes(b"")
    with pytest.raises(ModelError) as refusal:
        local_path(str(tmp_path))
    last = checkpoints / "last.ckpt"
    assert f"ppo-lightning export {last} {tmp_path / 'model'}" in str(refusal.value)
    assert "(2 in all)" in str(refusal.value)


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ModelError, match="neither a model nor a checkpoint"):
        local_path(str(tmp_path))


def test_another_folder_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ModelError, match=r"holds no `config\.json`"):
        local_path(str(tmp_path))


def test_a_half_written_model_is_none(tmp_path):
    (tmp_path / ".model.abc.new").mkdir()
    (tmp_path / ".model.abc.new" / "config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelError):
        local_path(str(tmp_path))


def test_tokenizer_and_weights_come_from_the_runs_model(tiny_llama_dir, tmp_path):
    (tmp_path / "model").symlink_to(tiny_llama_dir, target_is_directory=True)
    assert load_tokenizer(str(tmp_path)).chat_template


def test_a_run_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    model(version(tmp_path / "runs" / "sft", 0) / "model")
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"`runs` holds the runs sft\. Did you mean `runs/sft`"):
        local_path("runs/stf")
    with pytest.raises(ModelError, match="Run it first"):
        local_path("runs/reward")
    assert local_path("owner/name") == "owner/name"  # a folder of that name holds no runs
    assert local_path("gpt2") == "gpt2"
