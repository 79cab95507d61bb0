"""Places at which a process can be hit do nothing until they are told to."""

import signal

import pytest

from ppo_lightning.distributed import fault_point, faults


@pytest.fixture
def heard(monkeypatch):
    """Signals that this process would have got."""
    signals = []
    monkeypatch.setattr(faults.os, "kill", lambda pid, number: signals.append(number))
    monkeypatch.setattr(faults, "_passed", faults.Counter())
    return signals


def passed(*names):
    for name in names:
        fault_point(name)


def test_nothing_happens_unless_asked(heard, monkeypatch):
    monkeypatch.delenv(faults.FAULT_VARIABLE, raising=False)
    passed("a", "a")
    assert heard == []


@pytest.mark.parametrize(("wish", "kind"), [("a:2", "KILL"), ("a:2:TERM", "TERM")])
def test_the_process_is_hit_once_at_the_place_and_count(heard, monkeypatch, wish, kind):
    monkeypatch.setenv(faults.FAULT_VARIABLE, wish)
    passed("a", "b", "b")
    assert heard == []
    passed("a", "a", "a")
    assert heard == [signal.Signals[f"SIG{kind}"]]


@pytest.mark.parametrize("wish", ["a", "a:b", "a:1:NOSUCH", "a:1:TERM:x"])
def test_a_wish_that_makes_no_sense_is_refused(heard, monkeypatch, wish):
    monkeypatch.setenv(faults.FAULT_VARIABLE, wish)
    with pytest.raises(ValueError, match="PPO_LIGHTNING_FAULT"):
        fault_point("a")
