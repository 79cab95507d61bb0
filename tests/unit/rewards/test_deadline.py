"""A function that does not come back."""

import threading

import pytest
import torch

from ppo_lightning.errors import RewardError
from ppo_lightning.rewards import FunctionReward, RewardPipeline, RewardTerm, scores_of
from ppo_lightning.rewards.deadline import call_within
from tests.helpers.completions import make_completions

NEVER = threading.Event()


def hang(responses):
    NEVER.wait(30)
    return [0.0] * len(responses)


def length(responses, scale=1.0):
    return [scale * len(text) for text in responses]


def refuse(responses):
    raise LookupError("no such word")


def leave(responses):
    raise SystemExit("gone")


def wait_reward(name, timeout):
    return FunctionReward(f"{__file__}:{name}", timeout=timeout)


def test_a_call_that_hangs_is_an_error_that_names_it():
    judge = RewardPipeline([RewardTerm(name="slow", component=wait_reward("hang", 0.05))])
    with pytest.raises(
        RewardError, match=r"reward `slow`: `hang` \(2 responses\).*`timeout: 0.05`"
    ):
        judge(make_completions(["a", "b"]))
    NEVER.set()


def test_one_in_time_is_as_without():
    completions = make_completions(["a", "abc"])
    for timeout in (None, 60.0):
        reward = FunctionReward(f"{__file__}:length", {"scale": 0.5}, timeout=timeout)
        assert scores_of(reward, "r", completions).tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [("refuse", "raised LookupError: no such word"), ("leave", "raised SystemExit: gone")],
)
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_errors_come_through(name, message, timeout):
    with pytest.raises(RewardError, match=f"reward `r`: .*{message}"):
        scores_of(wait_reward(name, timeout), "r", make_completions(["a"]))


@pytest.mark.parametrize("grad", [True, False])
def test_the_thread_has_the_callers_grad_mode_and_does_not_hold_the_process(grad):
    def look():
        return torch.is_grad_enabled(), threading.current_thread().daemon

    with torch.set_grad_enabled(grad):
        assert call_within(look, seconds=60, name="look") == (grad, True)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_above_zero(timeout):
    with pytest.raises(ValueError, match="`timeout` must be a finite number above 0"):
        wait_reward("length", timeout)
