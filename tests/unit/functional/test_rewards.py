import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    clip_scores,
    discounted_returns,
    gae,
    score_after_penalties,
    token_rewards,
)

NAN = float("nan")
PREFIX = torch.tensor([[1, 1, 0, 0]]).bool()
ONES = torch.ones(1, 4)


@pytest.mark.parametrize("padding", [0, 2])
def test_t22_score_sits_on_the_last_valid_token(padding: int):
    mask = torch.tensor([[1, 1, 1] + [0] * padding]).bool()
    kl, values = torch.zeros(mask.shape), torch.full(mask.shape, 0.5)
    rewards = token_rewards(torch.ones(1), kl, mask, kl_coef=0.0)
    assert rewards.tolist() == [[0, 0, 1] + [0] * padding]
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    assert_close(advantages[:, :3], torch.tensor([[0.45125, 0.475, 0.5]]))
    assert_close(returns[:, :3], torch.tensor([[0.95125, 0.975, 1.0]]))


def test_t28_no_penalty_on_tokens_that_the_policy_did_not_write():
    rewards = token_rewards(torch.zeros(1), ONES, PREFIX, kl_coef=1.0)
    assert rewards.tolist() == [[-1, -1, 0, 0]]
    assert discounted_returns(rewards, PREFIX, gamma=1.0)[0, 0].item() == -2.0


def test_placements_share_the_same_sum():
    kl = torch.tensor([[0.25, 0.5, NAN, NAN]])
    rewards = {
        placement: token_rewards(torch.ones(1), kl, PREFIX, kl_coef=2.0, placement=placement)
        for placement in ("token", "last", "loss")
    }
    assert rewards["token"].tolist() == [[-0.5, 0.0, 0, 0]]
    assert rewards["last"].tolist() == [[0, -0.5, 0, 0]]
    assert rewards["loss"].tolist() == [[0, 1.0, 0, 0]]


def test_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="one of token, last, loss, got 'end'"):
        token_rewards(ONES[0, :1], ONES, PREFIX, kl_coef=1.0, placement="end")  # type: ignore[arg-type]


def test_scores_per_token_are_added_and_masked():
    parts = torch.tensor([[0.5, 0.25, 9.0, NAN]])
    rewards = token_rewards(torch.ones(1), ONES, PREFIX, kl_coef=1.0, token_scores=parts)
    assert rewards.tolist() == [[-0.5, 0.25, 0, 0]]


def test_holes_get_no_penalty_and_no_score():
    mask = torch.tensor([[1, 0, 1, 0]]).bool()
    rewards = token_rewards(torch.tensor([3.0]), ONES, mask, kl_coef=1.0)
    assert rewards.tolist() == [[-1, 0, 2, 0]]


def test_empty_row_gets_nothing_even_from_a_score_that_is_nan():
    rewards = token_rewards(torch.tensor([NAN]), ONES, PREFIX & False, kl_coef=1.0)
    assert rewards.tolist() == [[0, 0, 0, 0]]


def test_coefficient_of_zero_ignores_an_estimate_that_overflowed():
    rewards = token_rewards(torch.ones(1), ONES * float("inf"), PREFIX, kl_coef=0.0)
    assert rewards.tolist() == [[0, 1, 0, 0]]


def test_t27_rewards_carry_no_gradient():
    kl = ONES.clone().requires_grad_()
    assert not token_rewards(torch.ones(1), kl, PREFIX, kl_coef=1.0).requires_grad


def test_missing_end_costs_the_penalty_once():
    scores, ended = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    paid = score_after_penalties(scores, ended_with_eos=ended, missing_eos_penalty=0.5)
    assert paid.tolist() == [1.0, 0.5]


def test_clip_bounds_either_side_and_shows_a_nan():
    scores = torch.tensor([-5.0, 0.0, 5.0, NAN])
    assert clip_scores(scores, -1, None)[:3].tolist() == [-1, 0, 5]
    assert clip_scores(scores, None, 1)[:3].tolist() == [-5, 0, 1]
    assert clip_scores(scores, None, None) is scores
    assert clip_scores(scores, -1, 1)[3].isnan()


def test_t44_rewards_of_bfloat16_are_made_in_float32():
    scores, kl = torch.tensor([0.0]).bfloat16(), torch.tensor([[2**-7]]).bfloat16()
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert token_rewards(scores, kl, mask, kl_coef=0.0).dtype == torch.float32
    # A tenth of it lies between two numbers of bfloat16.
    rewards = token_rewards(scores, kl, mask, kl_coef=0.1)
    assert rewards.item() == pytest.approx(-0.1 * 2**-7, rel=1e-6)
