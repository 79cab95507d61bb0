"""What the package logs is seen on the command line."""

import logging

import pytest

from ppo_lightning.cli.logs import show_log
from ppo_lightning.cli.main import main


@pytest.fixture(autouse=True)
def _as_before():
    log = logging.getLogger("ppo_lightning")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


def test_a_line_is_printed_once_and_others_are_left_alone(capsys):
    show_log()
    show_log()
    logging.getLogger("ppo_lightning.models").info("taken: %s", "model")
    logging.getLogger("ppo_lightning.models").debug("not this")
    logging.getLogger("other").info("nor this")
    assert capsys.readouterr().err == "ppo-lightning: taken: model\n"


def test_of_several_processes_the_first_one_speaks_but_all_warn(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    show_log()
    logging.getLogger("ppo_lightning.models").info("taken")
    logging.getLogger("ppo_lightning.models").warning("broken")
    assert capsys.readouterr().err == "ppo-lightning: broken\n"


def test_the_commands_turn_it_on(capsys):
    log = logging.getLogger("ppo_lightning")
    log.handlers.clear()
    assert main(["--version"]) == 0
    log.info("seen")
    assert "ppo-lightning: seen" in capsys.readouterr().err
