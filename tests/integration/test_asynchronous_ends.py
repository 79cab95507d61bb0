"""The process that samples never outlives the trainer, however that ends; started as users do."""

import signal
import time

import lightning.pytorch as pl
import pytest

from ppo_lightning.rollout import AsyncEngine
from tests.helpers.deaths import exit_codes
from tests.helpers.runs import data_module, ppo_module, trainer
from tests.helpers.sampling_process import Faulty, lives

TERMINATED = 128 + signal.SIGTERM


class Tell(pl.Callback):
    """Writes the number of the process that samples to a file."""

    def __init__(self, file):
        self.file = file

    def on_stage_start(self, trainer, module, name):
        if name == "update" and not self.file.exists():
            self.file.write_text(str(module.engine.pid))


def fit(model_dir, folder, inner):
    engine = AsyncEngine(inner, timeout=90)
    run = trainer(folder, callbacks=[Tell(folder / "pid")])
    run.fit(ppo_module(model_dir, engine=engine), data_module())


def gone(pid):
    """Whether it goes, within the time that a busy machine may need to notice."""
    for _ in range(300):
        if not lives(pid):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("fault", "inner", "code"),
    [
        pytest.param("step:6:TERM", None, TERMINATED, id="sigterm"),
        pytest.param("step:6:KILL", None, -signal.SIGKILL, id="killed", marks=pytest.mark.slow),
        # The process is stopped when the trainer dies: nothing in it can notice.
        pytest.param("step:3:KILL", Faulty("SIGSTOP", at=2), -signal.SIGKILL, id="killed, stopped"),
    ],
)
def test_it_ends_with_the_trainer(tiny_llama_dir, tmp_path, fault, inner, code):
    log = tmp_path / "log.txt"
    arguments = (tiny_llama_dir, tmp_path, inner)
    found = exit_codes(fit, *arguments, faults={0: fault}, log=log)
    assert found == [code], log.read_text(encoding="utf-8")
    assert gone(int((tmp_path / "pid").read_text()))
