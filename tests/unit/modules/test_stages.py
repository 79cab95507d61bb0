"""Stages are timed, and told to every callback that listens."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler

import ppo_lightning.modules.stages as stages
from ppo_lightning.distributed import pulse
from ppo_lightning.modules.stages import StageClock, call_listeners


class Listener:
    def __init__(self):
        self.heard = []

    def on_stage_start(self, trainer, module, name):
        self.heard.append(("start", name))

    def on_stage_end(self, trainer, module, name):
        self.heard.append(("end", name))


class Profiler:
    """Says to a list what it is told."""

    def __init__(self, heard):
        self.heard = heard

    @contextmanager
    def profile(self, name):
        self.heard.append(name)
        yield
        self.heard.append("end")


@pytest.fixture
def module():
    callbacks = [object(), Listener()]
    return SimpleNamespace(
        device=torch.device("cpu"),
        trainer=SimpleNamespace(callbacks=callbacks, profiler=PassThroughProfiler()),
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that shows 1, 2, 3 … whenever it is read."""
    ticks = iter(range(1, 100))
    monkeypatch.setattr(stages.time, "perf_counter", lambda: float(next(ticks)))
    return StageClock()


def test_stages_add_up_until_the_iteration_ends(clock, module):
    for name in ("rollout", "update", "update"):
        with clock.stage(module, name):
            pass
    assert clock.seconds == {"rollout": 1.0, "update": 2.0}
    assert clock.elapsed == 7.0  # seven readings after the first
    clock.reset()
    assert clock.seconds == {}
    assert clock.elapsed == 1.0
    assert module.trainer.callbacks[1].heard == [
        (what, name) for name in ("rollout", "update", "update") for what in ("start", "end")
    ]


def test_a_stage_knows_how_long_the_device_was_busy_and_this_rank_waited(
    clock, module, monkeypatch
):
    busy = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr(stages, "busy_seconds", lambda device: next(busy))
    for _ in range(2):
        with clock.stage(module, "update"), pulse.waiting():
            assert pulse.stage == "update"
    assert clock.busy == {"update": 0.75}
    assert clock.waited > 0
    clock.reset()
    assert (clock.busy, clock.waited) == ({}, 0.0)


def test_a_device_that_does_not_tell_is_left_out(clock, module, monkeypatch):
    monkeypatch.setattr(stages, "busy_seconds", lambda device: None)
    with clock.stage(module, "update"):
        pass
    assert clock.busy == {}


def test_a_stage_that_fails_is_ended_all_the_same(clock, module):
    with pytest.raises(RuntimeError), clock.stage(module, "reward"):
        raise RuntimeError
    assert clock.seconds == {"reward": 1.0}
    assert module.trainer.callbacks[1].heard[-1] == ("end", "reward")


def test_hooks_get_trainer_module_and_what_they_are_about(module):
    seen = []
    module.trainer.callbacks.append(SimpleNamespace(on_update_end=lambda *a: seen.append(a)))
    call_listeners(module, "on_update_end", "stats")
    assert seen == [(module.trainer, module, "stats")]


def test_the_profiler_knows_a_stage_while_it_lasts_and_no_callback(clock, module):
    heard = module.trainer.callbacks[1].heard
    module.trainer.profiler = Profiler(heard)
    with clock.stage(module, "rollout"):
        heard.append("work")
    assert heard == [("start", "rollout"), "[Stage]rollout", "work", "end", ("end", "rollout")]
