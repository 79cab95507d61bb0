"""Two ranks of one process, over a real store: what they hear of each other, and what follows."""

import threading
import time
from types import SimpleNamespace

import pytest

from ppo_lightning.distributed import LOST_RANK, Heartbeat, Pulse, Watch, open_store
from ppo_lightning.distributed.heartbeat import all_heard, place_in_code

INTERVAL = 0.02


class Store:
    """What both ranks write to; rank 0 may be gone with it."""

    def __init__(self):
        self.values, self.error = {}, None

    def set_timeout(self, timeout): ...

    def set(self, key, value):
        if self.error is not None:
            raise self.error
        self.values[key] = value

    def multi_get(self, keys):
        return [self.values[key] for key in keys]


def hearts(store, clock=time.monotonic):
    """Of two ranks, each with a pulse of its own."""
    options = {"world_size": 2, "interval": INTERVAL, "clock": clock}
    made = [Heartbeat(store, rank=r, pulse=Pulse(clock), **options) for r in (0, 1)]
    for heart in made:
        heart.begin()
    return made


@pytest.fixture
def pair():
    pair = hearts(Store())
    for heart in pair:
        heart.start()
    yield pair
    for heart in pair:
        heart.stop()


def heard_of(heart, other, wanted):
    """Wait until a rank has heard something of another."""
    return heart.wait_until(lambda seen: other in seen and wanted(seen[other].beat), 20)


def test_ranks_hear_of_stage_place_and_end(pair):
    first, second = pair
    second._pulse.iteration, second._pulse.step = 4, 2
    second._pulse.enter("update")
    assert heard_of(
        first, 1, lambda beat: (beat.stage, beat.iteration, beat.step) == ("update", 4, 2)
    )
    second.say("failed", "no")
    assert heard_of(first, 1, lambda beat: (beat.state, beat.message) == ("failed", "no"))
    assert second.wait_until(lambda seen: all_heard(seen, 1, 20), 20)
    second.say("ended")  # what was told first stays
    assert second.look()[1].beat.state == "failed"


def test_the_ranks_themselves_say_that_they_wait_and_where(pair):
    first, second = pair
    with second._pulse.waiting():
        assert heard_of(first, 1, lambda beat: beat.waiting and "heartbeat.py:" in beat.where)
    assert heard_of(first, 1, lambda beat: not beat.waiting)


def frames(*places):
    """A stack of calls, the innermost first."""
    frame = None
    for file, name in reversed(places):
        code = SimpleNamespace(co_filename=file, co_name=name)
        frame = SimpleNamespace(f_code=code, f_lineno=7, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("inner", "waits"),
    [
        ([], False),
        ([("/x/torch/distributed/distributed_c10d.py", "barrier")], True),
        ([("/x/torch/autograd/graph.py", "_engine_run_backward")], True),
        ([("/x/torch/nn/modules/module.py", "_call_impl")], False),
    ],
)
def test_code_of_torch_that_brings_ranks_together_is_waiting(inner, waits):
    stack = frames(*inner, ("/home/me/mine/reward.py", "slow"), ("/x/torch/distributed/a.py", "b"))
    assert place_in_code(stack) == ("mine/reward.py:7 (slow)", waits)


def test_no_code_says_nothing():
    assert place_in_code(None) == ("", False)
    assert place_in_code(frames(("/x/torch/distributed/a.py", "b"))) == ("", True)


def test_a_store_of_torch_carries_it():
    hosts = open_store("localhost", None)
    first = Heartbeat(hosts, rank=0, world_size=2, interval=INTERVAL, pulse=Pulse())
    other = open_store("localhost", hosts.port)
    second = Heartbeat(other, rank=1, world_size=2, interval=INTERVAL, pulse=Pulse())
    for heart in (first, second):
        heart.begin()
    for heart in (first, second):
        heart.start()
    assert heard_of(second, 0, lambda beat: beat.number > 2)
    assert heard_of(first, 1, lambda beat: beat.number > 2)
    for heart in (second, first):
        heart.stop()


def test_a_broken_store_is_rank_0s_end_and_a_late_one_is_silence():
    now, store = [0.0], Store()
    _, second = hearts(store, clock=lambda: now[0])
    second._exchange()
    store.error, now[0] = RuntimeError("Socket Timeout"), 7.0
    second._exchange()
    assert not second._broken
    assert second.look()[0].silent == 7.0
    store.error = RuntimeError("Connection reset by peer")
    second._exchange()
    assert second._broken
    assert not second.look()[0].gone  # it is on this machine, and there


def test_many_ranks_look_less_often():
    heart = Heartbeat(Store(), rank=0, world_size=256, interval=1.0)
    assert heart.interval == 4.0


def watch(heart, timeout, advice="Go on."):
    ends = []
    seen = threading.Event()

    def end(status):
        ends.append(status)
        seen.set()

    made = Watch(heart, timeout=timeout, advice=lambda: advice, end=end)
    return made, ends, seen


def test_a_rank_that_waits_in_vain_is_ended_with_a_word(capfd):
    first, second = hearts(Store())
    dog, ends, ended = watch(first, timeout=0.2)
    first._pulse.enter("update")
    second._pulse.enter("reward")
    second.start()
    dog.start()
    with first._pulse.waiting():
        assert ended.wait(20)
    dog.stop()
    second.stop()
    said = capfd.readouterr().err
    assert ends == [LOST_RANK]
    assert "ppo-lightning: rank 0 ends: rank 1 has made no progress for" in said
    assert "Go on." in said


def test_an_error_elsewhere_leaves_a_rank_time_to_see_it_itself():
    first, second = hearts(Store())
    dog, _, ended = watch(first, timeout=0.3)
    second.start()
    dog.start()
    second.say("failed", "no")
    assert heard_of(first, 1, lambda beat: beat.state == "failed")
    for _ in range(20):  # it goes on working, for longer than the grace
        first._pulse.beat()
        assert not ended.wait(0.02)
    assert ended.wait(20)
    dog.stop()
    second.stop()


def test_a_broken_collective_is_explained_by_the_rank_that_failed():
    first, second = hearts(Store())
    dog, ends, _ = watch(first, timeout=5.0)
    second.start()
    dog.start()
    second.say("failed", "ValueError: no")
    said = dog.explain("Connection closed by peer")
    assert said.startswith("rank 1 failed in the start, before the first stage: ValueError: no")
    assert said.endswith("Go on.")
    second.stop()
    assert ends == []


def test_what_cannot_be_explained_is_told_in_the_librarys_words():
    first, second = hearts(Store())
    dog, _, _ = watch(first, timeout=0.2)
    second.start()
    dog.start()
    said = dog.explain("Connection closed by peer")
    assert "none is known to be gone. " in said
    assert "(Connection closed by peer)" in said
    second.stop()


def test_advice_that_hangs_is_not_waited_for():
    first, second = hearts(Store())
    hold = threading.Event()
    dog, _, _ = watch(first, timeout=0.2)
    dog.advice = lambda: hold.wait(60) and "late"
    second.start()
    dog.start()
    second.say("failed", "no")
    assert "no" in dog.explain("x")
    hold.set()
    second.stop()


def test_rank_0_leaves_last():
    first, second = hearts(Store())
    dogs = [watch(heart, timeout=20.0)[0] for heart in (first, second)]
    for dog in dogs:
        dog.start()
    leaving = threading.Thread(target=dogs[0].leave)
    leaving.start()
    assert heard_of(second, 0, lambda beat: beat.state == "ended")
    assert leaving.is_alive()
    dogs[1].leave()
    leaving.join(20)
    assert not leaving.is_alive()
