import math

import pytest

from ppo_lightning.callbacks import BufferScheduler
from ppo_lightning.errors import ConfigError
from tests.helpers.controllers import StandIn

QUICK = {"window": 2, "frequent": 1.0, "patience": 3}


def run(callback=None, epochs=3, **settings):
    callback = BufferScheduler(**QUICK | settings)
    return StandIn(callback, ppo={"num_update_epochs": epochs}).start()


def course(module, stopped, first=0):
    """K and factor after each iteration."""
    found = []
    for iteration, flag in enumerate(stopped, start=first):
        module.end_iteration(iteration, kl_stopped=flag)
        found.append((module.controls["num_update_epochs"], module.controls["num_prompts_factor"]))
    return found


def test_epochs_give_way_first_then_the_buffer():
    found = course(run(max_factor=4.0), [1.0] * 10)
    assert found[1::2] == [(2, 1), (1, 1), (1, 2), (1, 4), (1, 4)]
    assert found[2::2] == found[1:-1:2]  # a change needs a whole window


def test_the_buffer_gives_way_first_then_epochs():
    found = course(run(first="buffer", max_factor=3.0, min_epochs=2), [1.0] * 8)
    assert found[1::2] == [(3, 2), (3, 3), (2, 3), (2, 3)]


def test_the_way_back_is_the_way_there():
    module = run(epochs=2)
    assert course(module, [1.0] * 6)[-1] == (1, 4)
    found = course(module, [0.0] * 12, first=6)
    assert found[2::3] == [(1, 2), (1, 1), (2, 1), (2, 1)]
    assert module.controls.journal[-1]["reason"] == "no update was stopped in 3 iterations"


def test_between_frequent_and_never_nothing_changes():
    module = run()
    course(module, [1.0, 1.0])
    assert set(course(module, [0.0, 0.0, 1.0] * 5, first=2)) == {(2, 1)}


def test_the_share_counts_and_is_told():
    module = run(window=4, frequent=0.5, patience=4)
    assert course(module, [1.0, 0.0, 0.0, 0.0])[-1] == (3, 1)
    assert course(module, [1.0, 1.0], first=4)[-1] == (2, 1)
    assert module.controls.journal[0]["reason"] == ("2 of 4 updates were stopped by KL(old‖new)")


@pytest.mark.parametrize("value", [None, math.nan])
def test_an_iteration_without_update_is_left_out(value):
    module = run()
    assert course(module, [1.0, value]) == [(3, 1), (3, 1)]
    assert course(module, [1.0], first=2) == [(2, 1)]


def test_t53_what_was_seen_survives_a_resume_at_any_iteration():
    flags = [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    whole = run()
    course(whole, flags)
    assert len(whole.controls.journal) == 4
    for after in range(1, len(flags)):
        stopped = run()
        course(stopped, flags[:after])
        again = stopped.resumed(BufferScheduler(**QUICK))
        course(again, flags[after:], first=after)
        assert again.controls.state_dict() == whole.controls.state_dict()


def test_a_run_without_stops_is_refused():
    with pytest.raises(ConfigError, match=r"`ppo\.target_kl: null`"):
        StandIn(BufferScheduler(), ppo={"target_kl": None}).start()


def test_a_least_k_above_the_configured_is_refused():
    with pytest.raises(ConfigError, match=r"`min_epochs` of BufferScheduler \(5\)"):
        StandIn(BufferScheduler(min_epochs=5), ppo={"num_update_epochs": 4}).start()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("first", "batch"),
        ("window", 0),
        ("frequent", 0.0),
        ("frequent", 1.5),
        ("patience", 4),
        ("min_epochs", 0),
        ("growth", 1.0),
        ("growth", math.nan),
        ("max_factor", 0.5),
        ("max_factor", 17.0),
    ],
)
def test_senseless_arguments_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        BufferScheduler(**{argument: value})
