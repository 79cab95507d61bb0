"""What the handler of SIGTERM does, without a run."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ppo_lightning.modules import StopOnSigterm, interrupts

MODULE = SimpleNamespace(device="cpu", iteration=4)


@pytest.fixture(autouse=True)
def _handler_as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def trainer(tmp_path):
    return SimpleNamespace(
        is_global_zero=True,
        ckpt_path=None,
        checkpoint_callbacks=[],
        loggers=[],
        default_root_dir=str(tmp_path),
        current_epoch=4,
        max_epochs=9,
        state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(launcher=None),
        _checkpoint_connector=SimpleNamespace(_restore_modules_and_callbacks=None),
        _accelerator_connector=SimpleNamespace(cluster_environment=LightningEnvironment()),
    )


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def started(trainer, clock=None):
    stop = StopOnSigterm(clock or Clock())
    stop.setup(trainer, MODULE, "fit")
    stop.on_train_start(trainer, MODULE)
    return stop


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_signal_waits_for_the_next_place(trainer, capfd):
    stop = started(trainer)
    stop.on_train_batch_start(trainer, MODULE, None, 0)
    send()
    assert "the run stops at the next place" in capfd.readouterr().err
    stop.on_stage_start(trainer, MODULE, "validation")  # ranks may enter it unequally often
    with pytest.raises(SIGTERMException) as caught:
        stop.on_train_batch_start(trainer, MODULE, None, 0)
    assert caught.value.code == 143
    assert "in iteration 4" in capfd.readouterr().err


@pytest.mark.parametrize("stage", ["rollout", "reward", "scoring"])
def test_stages_of_a_rollout_are_such_places(trainer, stage):
    stop = started(trainer)
    send()
    with pytest.raises(SIGTERMException):
        stop.on_stage_start(trainer, MODULE, stage)


def test_the_handler_is_put_back(trainer):
    def users(signum, frame):
        called.append(signum)

    called = []
    signal.signal(signal.SIGTERM, users)
    stop = started(trainer)
    send()
    assert called == [signal.SIGTERM]  # it hears of the signal, too
    stop.teardown(trainer, MODULE, "fit")
    assert signal.getsignal(signal.SIGTERM) is users


def test_only_the_main_thread_can_have_a_handler(trainer):
    before = signal.getsignal(signal.SIGTERM)
    failed = []

    def run():
        try:
            started(trainer)
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failed == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_process_at_once_with_those_that_it_started(trainer, monkeypatch):
    clock, killed = Clock(), []
    trainer.strategy.launcher = SimpleNamespace(kill=killed.append)
    started(trainer, clock)
    send()
    send()  # the same request, sent twice
    assert killed == []
    clock.now += 1.5
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    signal.raise_signal(signal.SIGTERM)
    assert killed == [signal.SIGKILL, (os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # so that it is deadly


def test_slurm_is_not_asked_to_save_inside_an_iteration(trainer, monkeypatch):
    said = []
    monkeypatch.setattr(interrupts, "rank_zero_info", said.append)
    environment = SLURMEnvironment(auto_requeue=True)
    trainer._accelerator_connector.cluster_environment = environment
    started(trainer)
    assert environment.auto_requeue is False
    assert "`scontrol requeue $SLURM_JOB_ID` follow exit status 143" in said[0]


@pytest.mark.parametrize(("status", "requeued"), [(143, "requeue 77\n"), (0, ""), (2, "")])
def test_the_pages_job_script_requeues_a_job_that_was_stopped_and_no_other(status, requeued):
    page = Path(__file__).parents[3] / "docs/how-to/resume.md"
    script = page.read_text(encoding="utf-8").split("```text\n#!/bin/bash\n")[1].split("```")[0]
    stubs = f'srun() {{ return {status}; }}\nscontrol() {{ echo "$@"; }}\nSLURM_JOB_ID=77\n'
    done = subprocess.run(["bash", "-c", stubs + script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, requeued)


def test_a_signal_after_an_early_stop_finds_a_complete_run(trainer, capfd):
    stop = started(trainer)
    send()
    with pytest.raises(SIGTERMException):
        stop.on_train_end(trainer, MODULE)  # iteration 4 of 9
    said = capfd.readouterr().err
    assert "after the last iteration; the run is complete" in said
    assert "goes on" not in said
