import math

import numpy as np
import pytest
import torch

from ppo_lightning.errors import RewardError
from ppo_lightning.rewards import scores_of
from tests.helpers.completions import Says, make_completions

THREE = make_completions(["a", "b", "c"], prompts=["first", "second", "third"])


def ask(answer, completions=THREE, **options):
    return scores_of(Says(answer), "judge", completions, **options)


@pytest.mark.parametrize(
    "answer",
    [
        [1, 2.0, 3],
        (1.0, 2.0, 3.0),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([[1], [2], [3]]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1.0, 2.0, 3.0]),
        np.array([[1.0], [2.0], [3.0]], dtype=np.float32),
        [torch.tensor(1.0), np.float32(2), torch.tensor([3.0])],
    ],
)
def test_answers_that_are_three_scores(answer):
    scores = ask(answer)
    assert scores.dtype == torch.float32
    assert scores.device.type == "cpu"
    assert not scores.requires_grad
    assert scores.tolist() == [1.0, 2.0, 3.0]


def test_booleans_are_scores():
    assert ask([True, False, True]).tolist() == [1.0, 0.0, 1.0]


async def _later(completions):
    return [1.0]


# T31. None of these may pass, be broadcast, or be cut to size.
@pytest.mark.parametrize(
    ("answer", "received"),
    [
        ([1.0], "received 1."),
        ([1.0] * 4, "received 4."),
        ([], "received 0."),
        (1.0, r"received 1.0 \(float\)"),
        (torch.tensor(1.0), r"received a tensor of shape \[\]"),
        (torch.ones(1), r"received a tensor of shape \[1\]"),
        (torch.ones(1, 3), r"received a tensor of shape \[1, 3\]"),
        (torch.ones(3, 3), r"received a tensor of shape \[3, 3\]"),
        (torch.ones(3, 1, 1), r"received a tensor of shape \[3, 1, 1\]"),
        (np.ones(4), r"received an array of shape \[4\]"),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, "received a dict of 3 entries"),
        ({1.0, 2.0, 3.0}, r"\(set\)"),
        (lambda _: (x for x in [1.0, 2.0, 3.0]), "received a generator"),
        (lambda _: map(float, "123"), "received a map"),
        ("123", r"received '123' \(str\)"),
        (b"123", r"\(bytes\)"),
        (None, "received None"),
        (_later, "received a coroutine"),
    ],
)
@pytest.mark.parametrize("on_nonfinite", ["error", "drop"])
def test_answers_that_are_not_three_scores(answer, received, on_nonfinite):
    with pytest.raises(RewardError, match=received) as caught:
        ask(answer, on_nonfinite=on_nonfinite)
    assert caught.value.component == "judge"
    assert "reward `judge`" in str(caught.value)
    assert "expected 3 scores" in str(caught.value)


def test_one_response_needs_a_list_too():
    one = make_completions(["a"])
    with pytest.raises(RewardError, match="expected 1 scores"):
        ask(0.5, one)
    assert ask([0.5], one).tolist() == [0.5]


BAD = [math.nan, math.inf, -math.inf, None, "nan", "0.5", 1e300, 10**400]


@pytest.mark.parametrize("bad", BAD)
def test_a_score_that_is_no_finite_number_is_an_error_with_a_name(bad):
    with pytest.raises(RewardError) as caught:
        ask([0.5, bad, 0.25])
    message = str(caught.value)
    assert caught.value.sample == 1
    assert message.startswith("reward `judge`, sample 1: expected a finite number, received")
    assert repr(bad)[:60] in message
    assert "'second'" in message
    assert "1 of 3" in message
    assert "on_nonfinite: drop" in message


@pytest.mark.parametrize("bad", BAD)
def test_a_score_that_is_no_finite_number_can_be_dropped(bad):
    scores = ask([0.5, bad, 0.25], on_nonfinite="drop")
    assert scores[[0, 2]].tolist() == [0.5, 0.25]
    assert scores[1].isnan()


@pytest.mark.parametrize("entry", [[1.0, 2.0], {"score": 1.0}, 1j, torch.ones(2), object()])
def test_an_entry_that_is_no_number_at_all_is_an_error_always(entry):
    with pytest.raises(RewardError, match="expected a number, received") as caught:
        ask([0.5, 0.25, entry], on_nonfinite="drop")
    assert caught.value.sample == 2


def test_complex_tensors_are_refused():
    with pytest.raises(RewardError, match="expected a number"):
        ask(torch.ones(3, dtype=torch.complex64))


def test_a_component_that_raises_is_named():
    def fails(_):
        raise KeyError("label")

    with pytest.raises(
        RewardError, match="reward `judge`: Says raised KeyError: 'label'"
    ) as caught:
        ask(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_component_that_leaves_the_process_is_named():
    def leaves(_):
        raise SystemExit(3)

    with pytest.raises(RewardError, match="reward `judge`: Says raised SystemExit: 3"):
        ask(leaves)


def test_a_component_that_names_the_sample_gets_its_name_added():
    def fails(_):
        raise RewardError("no answer to compare with.", sample=2)

    with pytest.raises(RewardError, match="reward `judge`, sample 2: no answer"):
        ask(fails)


def test_no_responses_are_no_question():
    silent = Says(None)
    scores = scores_of(silent, "judge", make_completions([]))
    assert scores.shape == (0,)
    assert scores.dtype == torch.float32
    assert silent.calls == []


def test_long_prompts_are_shortened_in_messages():
    long = make_completions(["a"], prompts=["word " * 500])
    with pytest.raises(RewardError) as caught:
        ask([math.nan], long)
    assert len(str(caught.value)) < 400
