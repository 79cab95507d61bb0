"""Who keeps the others waiting, from what the ranks say of themselves."""

import pytest

from ppo_lightning.distributed import BETWEEN, START, Beat, Seen, judge
from ppo_lightning.distributed.beats import named_ranks

TIMEOUT = 10.0


def seen(rank, *, silent=0.0, gone=False, **said):
    said = {"stage": "update", "iteration": 3, "step": 2, **said}
    beat = Beat(rank=rank, machine="m", host="box", pid=100 + rank, birth=7, **said)
    return Seen(beat=beat, silent=silent, gone=gone)


def judged(*ranks, me=0):
    return judge({s.beat.rank: s for s in ranks}, me=me, timeout=TIMEOUT)


def test_a_beat_survives_its_journey():
    beat = seen(1, message="é", heard=(0, 2), waiting=True, idle=1.5).beat
    assert Beat.from_json(beat.to_json()) == beat


def test_nobody_is_named_while_all_make_progress():
    assert judged(seen(0), seen(1, idle=TIMEOUT)) is None


@pytest.mark.parametrize("stage", ["rollout", "reward", BETWEEN])
def test_a_slow_rank_that_makes_progress_is_left_alone_however_long_others_wait(stage):
    assert judged(seen(0, waiting=True, idle=1e6), seen(1, stage=stage, idle=9.0)) is None


def test_a_rank_without_progress_that_others_wait_for_is_named_with_its_stage():
    found = judged(
        seen(0, waiting=True, idle=30.0),
        seen(1, stage="reward", idle=31.0, where="mine.py:3 (slow)"),
        seen(2, waiting=True, idle=29.0),
    )
    assert (found.kind, found.ranks) == ("stuck", (1,))
    assert found.text == (
        "rank 1 has made no progress for 31 s in `reward`, iteration 3, step 2 at mine.py:3 "
        "(slow). ranks 0, 2: in `update`, iteration 3, step 2, waits for other ranks for 30 s."
    )


def test_nobody_waits_for_a_callback_that_all_ranks_are_in():
    both = {"stage": BETWEEN, "idle": 1e4}
    assert judged(seen(0, **both), seen(1, **both)) is None
    assert judged(seen(0, **both | {"waiting": True}), seen(1, **both)).ranks == (1,)


def test_a_stage_in_which_no_rank_gets_on_is_named_for_all():
    found = judged(seen(0, idle=11.0), seen(1, stage="scoring", idle=12.0))
    assert (found.kind, found.ranks) == ("stuck", (0, 1))


def test_loading_takes_as_long_as_it_takes():
    loading = seen(1, stage=START, idle=1e5)
    waits = {"stage": START, "waiting": True, "idle": 1e5}
    assert judged(seen(0, **waits), loading) is None
    assert judged(seen(0, **waits), seen(1, **waits)) is None


@pytest.mark.parametrize("me", [0, 2])
def test_a_rank_that_is_not_heard_is_named(me):
    found = judged(seen(0), seen(1, silent=10.5, stage="rollout"), seen(2), me=me)
    assert (found.kind, found.ranks) == ("silent", (1,))
    assert "rank 1 (process 101 on `box`) has not been heard from for 10 s" in found.text
    assert "It was in `rollout`, iteration 3, step 2. ranks 0, 2: in `update`" in found.text


def test_silence_is_not_taken_for_a_hang_that_nobody_has_reported():
    waiting = seen(0, waiting=True, idle=30.0)
    assert judged(waiting, seen(1, idle=0.5, silent=9.8)) is None
    assert judged(waiting, seen(1, idle=0.5, silent=10.2)).kind == "silent"


def test_a_process_that_is_gone_is_named_at_once():
    found = judged(seen(0), seen(1, gone=True, stage="checkpoint"))
    assert (found.kind, found.ranks) == ("gone", (1,))
    assert "its process (101 on `box`) ended without a word. It was in `checkpoint`" in found.text


def test_ranks_that_ended_regularly_are_not_gone():
    assert judged(seen(0), seen(1, gone=True, state="ended")) is None


def test_a_rank_that_ended_too_early_is_named_once_all_wait():
    ended = seen(1, gone=True, state="ended", silent=99.0)
    assert judged(seen(0, idle=9.0, waiting=True), ended) is None
    found = judged(seen(0, idle=11.0, waiting=True), ended)
    assert (found.kind, found.ranks) == ("ended", (1,))


def test_an_error_of_one_rank_comes_before_what_it_has_caused():
    failed = seen(2, state="failed", stage="reward", message="RewardError: no", gone=True)
    found = judged(seen(0), seen(1, state="lost", message="rank 0 is gone"), failed)
    assert (found.kind, found.ranks) == ("failed", (2,))
    assert found.text.startswith("rank 2 failed in `reward`, iteration 3, step 2: RewardError: no")
    assert "RewardError: no. rank 0: " in found.text
    assert "rank 1: in `update`, iteration 3, step 2, has given up." in found.text


def test_what_another_rank_has_found_out_is_believed():
    found = judged(seen(0), seen(1, state="lost", message="rank 7 is gone"))
    assert (found.kind, found.text) == ("told", "rank 7 is gone")
    assert judged(seen(0), seen(1, state="lost")) is None


def test_ranks_that_all_wait_are_told_apart_by_their_places():
    waits = {"waiting": True, "idle": 20.0}
    found = judged(seen(0, **waits), seen(1, **waits | {"stage": "reward"}))
    assert found.kind == "deadlock"
    assert "rank 0: in `update`" in found.text
    assert "rank 1: in `reward`" in found.text


def test_ranks_are_counted_off_in_runs():
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 0, 1, 2, 8, 9]) == "ranks 0-2, 5, 8-9"
