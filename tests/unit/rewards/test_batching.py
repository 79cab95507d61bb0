"""Requests that are scored together are answered apart."""

import asyncio
import math
import threading

import pytest
import torch

from ppo_lightning.errors import RewardError
from ppo_lightning.rewards import FunctionReward, TargetLengthReward
from ppo_lightning.rewards.batching import BatchScorer, QueueFull, Refused
from ppo_lightning.rewards.contract import Item
from tests.helpers.completions import Says, numbers_in


def items(*responses, **fields):
    return [Item(prompt="p", response=str(response), **fields) for response in responses]


def running(component, use, **options):
    """Call ``use(scorer)`` while batches are scored."""

    async def main():
        scorer = BatchScorer(component, name="judge", **options)
        scorer.load(torch.device("cpu"))
        batches = asyncio.ensure_future(scorer.run())
        try:
            return await use(scorer)
        finally:
            batches.cancel()
            await asyncio.gather(batches, return_exceptions=True)
            scorer.close()

    return asyncio.run(main())


def scored(component, *requests, **options):
    """Scores of requests that come at the same time; errors in their places."""

    async def use(scorer):
        return await asyncio.gather(*map(scorer.score, requests), return_exceptions=True)

    return running(component, use, **options)


def sizes(judge):
    return [len(call) for call in judge.calls]


def test_requests_share_a_batch_and_each_gets_its_own_scores():
    judge = Says(numbers_in)
    found = scored(judge, items(1, 2), items(3), items(4, 5), max_wait=0.1, max_batch=5)
    assert found == [[1.0, 2.0], [3.0], [4.0, 5.0]]
    assert sizes(judge) == [5]


def test_batches_are_no_larger_than_allowed_and_requests_may_lie_across():
    judge = Says(numbers_in)
    found = scored(judge, items(*range(5)), items(5, 6), max_batch=3, max_wait=0)
    assert found == [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0]]
    assert sizes(judge) == [3, 3, 1]
    assert judge.calls[1].responses == ["3", "4", "5"]


def test_one_alone_does_not_wait_for_a_full_batch():
    assert scored(Says(numbers_in), items(7), max_batch=100, max_wait=0.01) == [[7.0]]


def test_what_arrives_while_the_model_is_busy_is_one_batch():
    busy, go = threading.Event(), threading.Event()

    def slow(completions):
        busy.set()
        assert go.wait(timeout=60)
        return numbers_in(completions)

    judge = Says(slow)

    async def use(scorer):
        first = asyncio.ensure_future(scorer.score(items(0)))
        while not busy.is_set():
            await asyncio.sleep(0.001)
        rest = [asyncio.ensure_future(scorer.score(items(i))) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(first, *rest)

    assert running(judge, use, max_wait=0) == [[0.0], [1.0], [2.0], [3.0]]
    assert sizes(judge) == [1, 3]


def test_no_items_are_no_question():
    judge = Says(None)
    assert scored(judge, []) == [[]]
    assert judge.calls == []


def test_one_bad_item_fails_its_own_request_alone():
    judge = Says(numbers_in)  # "x" is no number
    good, bad, also_good = scored(
        judge, items(1), items(2, "x"), items(3), max_wait=0.1, max_batch=4
    )
    assert (good, also_good) == ([1.0], [3.0])
    assert isinstance(bad, RewardError)
    assert not isinstance(bad, Refused)


def test_a_score_that_is_no_number_is_nan_for_that_item_alone():
    judge = Says(lambda completions: [None if r == "x" else 1.0 for r in completions.responses])
    (first, second) = scored(judge, items("x", "y"), items("z"))
    assert math.isnan(first[0])
    assert (first[1], second) == (1.0, [1.0])


def test_a_wrong_number_of_scores_is_never_handed_out():
    (error,) = scored(Says([1.0]), items(1, 2))
    assert isinstance(error, RewardError)
    assert "expected 2 scores" in str(error)


def test_ids_that_were_not_sent_are_not_taken_for_none():
    """The length of an empty list would be a score like any other."""
    without, with_ids = scored(
        TargetLengthReward(2),
        items("a"),
        items("b", response_ids=[1, 2]),
        max_wait=0.1,
        max_batch=2,
    )
    assert isinstance(without, Refused)
    assert "reads `response_ids`, which the request lacks" in str(without)
    assert with_ids == [0.0]


def test_metadata_arrives(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def f(answer):\n    return answer\n")
    found, refused = scored(
        FunctionReward(f"{file}:f"), items("a", metadata={"answer": 3}), items("b")
    )
    assert found == [3.0]
    assert isinstance(refused, Refused)
    assert "asks for `answer`" in str(refused)


def test_more_than_the_queue_holds_is_refused_at_once():
    held, refused, small = scored(
        Says(numbers_in), items(1, 2), items(3, 4), items(5), max_queue=3, max_wait=0.01
    )
    assert (held, small) == ([1.0, 2.0], [5.0])
    assert isinstance(refused, QueueFull)


def test_a_request_that_is_given_up_takes_no_place_in_a_batch():
    judge = Says(numbers_in)

    async def use(scorer):
        leaving = asyncio.ensure_future(scorer.score(items(1, 2)))
        staying = asyncio.ensure_future(scorer.score(items(3)))
        await asyncio.sleep(0)
        leaving.cancel()
        return await staying

    assert running(judge, use, max_wait=0.05) == [3.0]
    assert sizes(judge) == [1]


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"max_wait": -1}, {"max_queue": 0}])
def test_settings_that_cannot_be(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        BatchScorer(Says(None), name="judge", **options)
