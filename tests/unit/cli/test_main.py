import os
import subprocess
import sys

import pytest

import ppo_lightning
from ppo_lightning import distributed
from ppo_lightning.cli import main as main_module
from ppo_lightning.cli.main import HELPER_COMMANDS, TRAINER_COMMANDS, is_expected, main
from ppo_lightning.configs import PPOConfig
from ppo_lightning.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RankError,
    RewardError,
    UpdateError,
)

HEAVY = {"torch", "lightning", "transformers", "jsonargparse", "numpy"}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["export", "--help"]])
def test_usage_and_version_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom ppo_lightning.cli.main import main\n"
        f"code = main({arguments})\nprint(sorted({HEAVY} & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_usage_names_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*TRAINER_COMMANDS, *HELPER_COMMANDS))


def test_version(capsys):
    assert main(["--version"]) == 0
    assert ppo_lightning.__version__ in capsys.readouterr().out


def test_unknown_command_names_the_nearest(capsys):
    assert main(["exprot", "a", "b"]) == 2
    assert "unknown command `exprot`; did you mean `export`?" in capsys.readouterr().err


def raising(monkeypatch, error):
    def dispatch(arguments):
        raise error

    monkeypatch.setattr(main_module, "_dispatch", dispatch)


EXPECTED = [
    ConfigError("bad"),
    DataError("bad", path="p.jsonl", line=3),
    ModelError("bad"),
    RewardError("bad", component="length"),
    CheckpointError("bad"),
    UpdateError("bad"),
]


@pytest.mark.parametrize("error", EXPECTED, ids=lambda error: type(error).__name__)
def test_errors_that_the_user_can_mend_are_one_message(monkeypatch, capsys, error):
    raising(monkeypatch, error)
    assert main(["fit"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"ppo-lightning: {error}\n"
    assert captured.out == ""


def test_a_lost_rank_has_an_exit_code_of_its_own(monkeypatch, capsys):
    raising(monkeypatch, RankError("rank 1 is gone"))
    assert main(["fit"]) == main_module.LOST_RANK == 75
    assert capsys.readouterr().err == "ppo-lightning: rank 1 is gone\n"


def test_the_exit_code_of_a_lost_rank_is_the_watchdogs():
    assert main_module.LOST_RANK == distributed.LOST_RANK


@pytest.mark.parametrize("place", [0, 1])
def test_debug_anywhere_shows_the_traceback(monkeypatch, place):
    raising(monkeypatch, ConfigError("bad"))
    arguments = ["fit"]
    arguments.insert(place, "--debug")
    with pytest.raises(ConfigError):
        main(arguments)


def test_other_errors_keep_their_traceback(monkeypatch):
    raising(monkeypatch, ValueError("from somewhere else"))
    with pytest.raises(ValueError, match="somewhere else"):
        main(["fit"])


def test_checks_of_this_package_are_told_shortly():
    with pytest.raises(ValueError, match="clip_range") as caught:
        PPOConfig(clip_range=2.0)
    assert is_expected(caught.value)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert not is_expected(caught.value)


def test_interrupts_end_with_130(monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    assert main(["fit"]) == 130

    def lightning_leaves(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    monkeypatch.setattr(main_module, "_dispatch", lightning_leaves)
    assert main(["fit"]) == 130


@pytest.mark.parametrize(("left_with", "code"), [(None, 0), (3, 3), ("text", 1)])
def test_exits_keep_their_code(monkeypatch, left_with, code):
    raising(monkeypatch, SystemExit(left_with))
    assert main(["fit"]) == code


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_reader_that_has_gone_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ppo_lightning.cli.main", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 141


def test_another_broken_pipe_is_not_taken_for_that(monkeypatch):
    raising(monkeypatch, BrokenPipeError("of a worker"))
    with open(os.devnull, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="of a worker"):
            main(["fit"])


def test_usage_says_what_wins_over_environment_variables(capsys):
    main([])
    assert "config files win over them, and options over both" in capsys.readouterr().out
