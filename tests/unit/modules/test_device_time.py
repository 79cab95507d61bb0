"""Idle time of the device: of a CPU by processor time, of a GPU by what its driver says."""

import time

import pytest
import torch

from ppo_lightning.modules import device_time
from ppo_lightning.modules.device_time import Utilisation, busy_seconds, idle_share

CPU = torch.device("cpu")


def test_a_cpu_is_busy_by_its_threads(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 8.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert busy_seconds(CPU) == 2.0


def test_sleep_is_idle_and_work_is_not():
    """Of a CPU that others use too, so bounds are wide: a sleep computes nothing at all."""
    start, busy = time.perf_counter(), busy_seconds(CPU)
    time.sleep(0.05)
    assert idle_share(busy_seconds(CPU) - busy, time.perf_counter() - start) > 0.5
    before = time.process_time()
    busy = busy_seconds(CPU)
    while time.process_time() - before < 0.05:
        pass
    assert busy_seconds(CPU) - busy == pytest.approx(0.05, abs=0.04)


@pytest.mark.parametrize(("busy", "share"), [(0.0, 1.0), (1.0, 0.75), (4.0, 0.0), (5.0, 0.0)])
def test_shares_stay_within_their_bounds(busy, share):
    assert idle_share(busy, 4.0) == share
    assert idle_share(busy, 0.0) == 0.0


def test_other_devices_say_nothing():
    assert busy_seconds(torch.device("meta")) is None


def test_a_gpu_is_busy_by_the_share_of_each_look():
    shares, now = iter([100.0, 50.0, 0.0]), [0.0]
    gpu = Utilisation(lambda: next(shares), clock=lambda: now[0])
    for seconds in (1.0, 3.0, 4.0):
        now[0] = seconds
        gpu.sample()
    assert gpu.busy() == 1.0 + 0.5 * 2.0 + 0.0


def test_a_gpu_that_cannot_be_read_says_nothing_and_is_asked_no_more():
    def read():
        raise ModuleNotFoundError("pynvml")

    gpu = Utilisation(read, seconds=0.001).start()
    gpu._thread.join(20)
    assert not gpu._thread.is_alive()
    assert gpu.busy() is None


def test_a_gpu_is_looked_at_from_a_thread(monkeypatch):
    looks = []
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: looks.append(index) or 100)
    monkeypatch.setattr(device_time, "SAMPLE_SECONDS", 0.001)
    monkeypatch.setattr(device_time, "_gpus", {})
    assert busy_seconds(torch.device("cuda", 3)) is not None
    gpu = device_time._gpus[3]
    gpu._ended.wait(0.3)
    gpu.sample()
    gpu.stop()
    assert set(looks) == {3}
    assert gpu.busy() > 0
