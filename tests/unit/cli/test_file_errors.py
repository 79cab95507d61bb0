"""What the file system refuses ends a command with one line: path, reason, way out."""

import errno
import os
from pathlib import Path

import pytest

from ppo_lightning.cli import main as main_module
from ppo_lightning.cli.file_errors import file_problem
from ppo_lightning.cli.main import main
from tests.helpers.cli import run_cli, tiny_config, write_config

CODES = ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "ENOENT", "ENOTDIR", "EEXIST"]


def raising(monkeypatch, error):
    def dispatch(arguments):
        raise error

    monkeypatch.setattr(main_module, "_dispatch", dispatch)


@pytest.mark.parametrize("name", CODES)
def test_one_line_with_path_reason_and_way_out(monkeypatch, capsys, name):
    number = getattr(errno, name)
    error = OSError(number, os.strerror(number), "runs/x/metrics.jsonl")
    raising(monkeypatch, error)
    assert main(["fit"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ppo-lightning: `runs/x/metrics.jsonl`: {os.strerror(number)}. ")
    assert "trainer" not in line  # it is not known to be the run's
    assert "`trainer.default_root_dir`" in str(file_problem(error, [Path("runs")]))
    assert "`trainer.default_root_dir`" in str(
        file_problem(error, [Path("runs/x/metrics.jsonl/y")])
    )
    assert "trainer" not in str(file_problem(error, [Path("other")]))


def test_a_full_disk_is_told_even_where_the_path_is_not_known(monkeypatch, capsys):
    raising(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    assert main(["fit"]) == 2
    assert "a file could not be written: No space left on device." in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError("by hand"),
        OSError(errno.ECONNRESET, "of a network", "host"),
        FileNotFoundError(errno.ENOENT, "a program, say"),
    ],
    ids=str,
)
def test_other_errors_of_the_system_keep_their_traceback(monkeypatch, error):
    raising(monkeypatch, error)
    with pytest.raises(OSError, match=r"hand|network|program"):
        main(["fit"])


def test_debug_shows_the_traceback(monkeypatch):
    raising(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "x"))
    with pytest.raises(OSError, match="No space"):
        main(["fit", "--debug"])


@pytest.mark.parametrize("logger", [True, False])
def test_a_run_that_cannot_have_its_folder(monkeypatch, tmp_path, capsys, tiny_llama_dir, logger):
    (tmp_path / "file").touch()
    config = tiny_config(tiny_llama_dir, tmp_path / "file/run")
    config["trainer"]["logger"] = logger
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "-c", path) == 2
    said = capsys.readouterr().err
    assert f"ppo-lightning: `{tmp_path}/file" in said
    assert "`trainer.default_root_dir`" in said


def test_a_file_that_a_reward_reads_is_no_matter_of_the_runs_folder(
    monkeypatch, tmp_path, capsys, tiny_llama_dir
):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    (tmp_path / "mine.py").write_text(
        "from ppo_lightning.rewards import Reward\n\n\nclass Listed(Reward):\n"
        "    def setup(self, device):\n        open('no-such-list.txt')\n\n"
        "    def __call__(self, completions): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config["model"]["init_args"]["rewards"][0]["component"] = {"class_path": "mine.Listed"}
    path = write_config(tmp_path / "c.yaml", config)
    assert run_cli(monkeypatch, "fit", "-c", path) == 2
    said = capsys.readouterr().err
    assert "ppo-lightning: `no-such-list.txt`: No such file or directory. See that it" in said
    assert "trainer.default_root_dir" not in said


def test_a_folder_that_must_not_be_written_to(monkeypatch, tmp_path, capsys, tiny_llama_dir):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    config["trainer"]["logger"] = False
    path = write_config(tmp_path / "c.yaml", config)
    # A stand-in, as tests may run as root, who may write everywhere.
    real, shut = os.access, str(tmp_path / "run")
    monkeypatch.setattr(
        os, "access", lambda path, *a, **k: str(path) != shut and real(path, *a, **k)
    )
    assert run_cli(monkeypatch, "fit", "-c", path) == 2
    assert f"`{tmp_path}/run/config.yaml`: Permission denied. " in capsys.readouterr().err
