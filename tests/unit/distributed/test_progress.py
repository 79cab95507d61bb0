import pytest

from ppo_lightning.distributed import BETWEEN, START, Pulse


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pulse(clock):
    return Pulse(clock)


def test_any_beat_is_progress(pulse, clock):
    clock.now = 5.0
    assert (pulse.stage, pulse.idle) == (START, 5.0)
    pulse.beat()
    assert pulse.idle == 0.0


def test_a_stage_ends_where_it_began_and_both_are_progress(pulse, clock):
    pulse.enter(BETWEEN)
    with pulse.in_stage("update"):
        clock.now = 3.0
        with pulse.in_stage("checkpoint"):
            assert (pulse.stage, pulse.idle) == ("checkpoint", 0.0)
        assert pulse.stage == "update"
    assert (pulse.stage, pulse.idle) == (BETWEEN, 0.0)


def test_the_stage_of_an_error_stays_to_be_told(pulse):
    with pytest.raises(ValueError, match="no"), pulse.in_stage("reward"):
        raise ValueError("no")
    assert pulse.stage == "reward"


def test_waiting_is_added_up_and_its_end_is_progress(pulse, clock):
    for _ in range(2):
        with pulse.waiting():
            assert pulse.is_waiting
            clock.now += 2.0
            assert pulse.idle == 2.0
        assert not pulse.is_waiting
        assert pulse.idle == 0.0
    assert pulse.waited == 4.0
