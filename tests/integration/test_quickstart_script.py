"""`experiments/quickstart/run.py`: what is run, what is kept, and what is refused."""

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.helpers.cli import changed, tiny_config, write_config
from tests.helpers.named import ROOT

CHANGE = {"before": 0.0, "after": 1.0, "gain": 1.0, "low": 0.5, "high": 1.5}
RESULT = {
    "changes": {"proxy reward": CHANGE},
    "memory_gib": 1.0,
    "seconds": 2.0,
    "cpu_seconds": 3.0,
}


@pytest.fixture
def script(monkeypatch):
    file = ROOT / "experiments" / "quickstart" / "run.py"
    spec = importlib.util.spec_from_file_location("quickstart_run", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(script, monkeypatch, tmp_path):
    """Call the script; `fit` is replaced by what leaves the given files in the run's folder."""
    config = write_config(tmp_path / "c.yaml", tiny_config("model", tmp_path))
    commands = []

    def run(*options, leaves=("summary.json",), code=0, seed=0):
        def fake(command, **_):
            commands.append(command)
            folder = tmp_path / "out" / f"seed_{seed}"
            for name in leaves:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(json.dumps(RESULT), encoding="utf-8")
            return SimpleNamespace(returncode=code)

        given = ["--out", tmp_path / "out", "--config", config, "--seed", seed, "--", *options]
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, given)])
        monkeypatch.setattr(subprocess, "run", fake)
        script.main()
        return commands

    run.config = config
    return run


def test_a_run_ends_with_the_table(call, capsys):
    [command] = call("--trainer.max_epochs", "1")
    assert command[-2:] == ["--trainer.max_epochs", "1"]
    assert "| 0 | 0.00 → 1.00 (+0.50 to +1.50) |" in capsys.readouterr().out


def test_a_run_that_is_done_is_not_repeated_and_says_so(call, capsys):
    call("--trainer.max_epochs", "1")
    capsys.readouterr()
    assert len(call("--trainer.max_epochs", "1")) == 1
    printed = capsys.readouterr().out
    assert "seed 0: already done, not repeated: " in printed
    assert "| 0 | 0.00 → 1.00" in printed
    assert len(call("--trainer.max_epochs", "1", seed=1)) == 2  # its folder is another


def test_the_result_of_other_options_is_not_shown(call):
    call("--trainer.max_epochs", "1")
    with pytest.raises(SystemExit, match=r"seed_0 holds a run with other options.*`--out`"):
        call("--trainer.max_epochs", "2")
    with pytest.raises(SystemExit, match="other options"):
        call()


def test_the_result_of_another_config_is_not_shown(call, tmp_path):
    call()
    write_config(call.config, changed(tiny_config("model", tmp_path), "seed_everything", 9))
    with pytest.raises(SystemExit, match="a run with other config"):
        call()


def test_a_run_that_was_cut_off_goes_on_with_the_same_options_only(call, capsys):
    cut_off = ["checkpoints/last.ckpt"]
    with pytest.raises(SystemExit) as left:
        call("--model.kl.coef", "0.1", leaves=cut_off, code=137)
    assert left.value.code == 137  # `fit` has said why
    with pytest.raises(SystemExit, match="other options"):
        call("--model.kl.coef", "0.2")
    first, second = call("--model.kl.coef", "0.1")
    assert "--ckpt_path" not in first
    assert second[-2] == "--ckpt_path"
    assert second[-1].endswith("last.ckpt")
    assert "goes on from" in capsys.readouterr().out


def test_a_start_that_failed_binds_nobody(call):
    with pytest.raises(SystemExit):
        call("--model.kl.coef", "none", leaves=[], code=2)
    assert len(call("--model.kl.coef", "0.1")) == 2


def test_a_folder_that_does_not_say_what_it_holds_is_not_taken(call, tmp_path):
    (tmp_path / "out" / "seed_0").mkdir(parents=True)
    (tmp_path / "out" / "seed_0" / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="other config and other options"):
        call()


def test_no_table_is_said_in_a_line(call):
    with pytest.raises(SystemExit, match=r"seed 0: the run has left no summary\.json in "):
        call(leaves=["checkpoints/last.ckpt"])


def test_a_config_that_is_not_there_is_named(call):
    call.config.unlink()
    with pytest.raises(SystemExit, match=r"the config file `.*c\.yaml` does not exist"):
        call()


@pytest.mark.slow
def test_one_iteration_of_a_config_that_validates_every_fifth(
    script, tiny_llama_dir, tmp_path, monkeypatch, capfd
):
    config = tiny_config(tiny_llama_dir, tmp_path)
    config["trainer"] |= {
        "check_val_every_n_epoch": 5,
        "callbacks": [{"class_path": "ppo_lightning.callbacks.BeforeAfter"}],
    }
    file = write_config(tmp_path / "c.yaml", config)
    given = ["--out", tmp_path / "out", "--config", file, "--", "--trainer.max_epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, given)])
    script.main()
    printed = capfd.readouterr().out
    assert "After 1 iterations; 2 prompts" in printed
    assert (tmp_path / "out" / "table.md").read_text(encoding="utf-8") in printed
