import os
import signal
import subprocess
import sys
import time

import pytest

from ppo_lightning.distributed import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_is_there_until_it_ends_also_as_a_zombie(child):
    birth = processes.birth_of(child)
    assert not processes.is_gone(child, birth)
    assert not processes.is_stopped(child)
    os.kill(child, signal.SIGKILL)
    until(lambda: processes.is_gone(child, birth))  # nobody has waited for it


def test_a_stopped_process_is_ended_all_the_same(child):
    birth = processes.birth_of(child)
    os.kill(child, signal.SIGSTOP)
    until(lambda: processes.is_stopped(child))
    assert not processes.is_gone(child, birth)
    processes.kill(child, birth)
    until(lambda: processes.is_gone(child, birth))


def test_a_number_that_was_given_anew_is_another_process(child):
    birth = processes.birth_of(child)
    assert processes.is_gone(child, birth + 1)
    processes.kill(child, birth + 1)
    processes.kill(child, None)
    assert not processes.is_gone(child, birth)


def test_without_a_birth_the_number_alone_is_asked(child, monkeypatch):
    assert not processes.is_gone(child, None)
    monkeypatch.setattr(os, "kill", lambda *_: (_ for _ in ()).throw(ProcessLookupError()))
    assert processes.is_gone(child, None)
    assert processes.birth_of(2**22 + 1) is None


def test_the_machine_has_one_name():
    assert processes.machine_name() == processes.machine_name() != ""
