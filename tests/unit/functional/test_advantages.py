import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import discounted_returns, gae

HALF = torch.full((1, 3), 0.5)
AT_END = torch.tensor([[0.0, 0.0, 1.0]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def test_gae_matches_hand_computation():
    # δ = (-0.25, -0.125, 0.875), A_t = δ_t + 0.5 A_{t+1}: exact in binary, so no tolerance.
    values = torch.tensor([[0.5, 0.25, 0.125]])
    advantages, returns = gae(AT_END, values, ALL, gamma=1.0, gae_lambda=0.5)
    assert advantages.tolist() == [[-0.09375, 0.3125, 0.875]]
    assert returns.tolist() == [[0.40625, 0.5625, 1.0]]


def test_t34_without_bootstrap_the_value_after_the_end_is_zero():
    advantages, _ = gae(AT_END, HALF, ALL, gamma=1.0, gae_lambda=0.95)
    assert_close(advantages, torch.tensor([[0.45125, 0.475, 0.5]]))


def test_t34_bootstrap_only_where_the_response_was_cut():
    advantages, returns = gae(
        AT_END.repeat(2, 1),
        HALF.repeat(2, 1),
        ALL.repeat(2, 1),
        gamma=1.0,
        gae_lambda=0.95,
        bootstrap_values=torch.tensor([0.8, 0.0]),
    )
    assert_close(advantages, torch.tensor([[1.17325, 1.235, 1.3], [0.45125, 0.475, 0.5]]))
    assert_close(returns, advantages + 0.5)


def test_t34_bootstrap_value_is_discounted_and_stands_after_the_last_valid_token():
    rewards, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]]).bool()
    end = torch.tensor([8.0])
    advantages, _ = gae(rewards, rewards, mask, gamma=0.5, gae_lambda=1.0, bootstrap_values=end)
    assert advantages.tolist() == [[2.0, 4.0, 0.0]]
    sums = discounted_returns(rewards, mask, gamma=0.5, bootstrap_values=end)
    assert sums.tolist() == [[2.0, 4.0, 0.0]]


def test_t34_bootstrap_value_of_an_empty_row_goes_nowhere():
    mask = torch.zeros(1, 3, dtype=torch.bool)
    nan = torch.tensor([float("nan")])
    advantages, returns = gae(HALF, HALF, mask, gamma=1.0, gae_lambda=1.0, bootstrap_values=nan)
    assert not advantages.any()
    assert not returns.any()


def test_t35_critic_output_at_padding_is_never_read():
    mask = torch.tensor([[1, 1, 0]]).bool()
    results = [
        gae(AT_END, torch.tensor([[0.5, 0.5, pad]]), mask, gamma=0.9, gae_lambda=0.95)
        for pad in (0.0, 100.0, float("nan"))
    ]
    for other in results[1:]:
        assert torch.equal(torch.stack(results[0]), torch.stack(other))


def test_holes_are_no_steps():
    # Rows closed up: values (0.5, 0.25), rewards (0, 1); δ = (-0.25, 0.75), A = (0.125, 0.75).
    values = torch.tensor([[0.5, 7.0, 0.25, 9.0]])
    rewards = torch.tensor([[0.0, 5.0, 1.0, 5.0]])
    mask = torch.tensor([[1, 0, 1, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.5)
    assert advantages.tolist() == [[0.125, 0.0, 0.75, 0.0]]
    assert returns.tolist() == [[0.625, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("width", [0, 1])
def test_narrow_batches(width: int):
    x = torch.ones(2, width)
    advantages, returns = gae(x, x, x.bool(), gamma=1.0, gae_lambda=0.95)
    assert advantages.tolist() == [[0.0] * width] * 2
    assert returns.tolist() == [[1.0] * width] * 2


def test_results_have_no_gradient_and_arguments_are_left_alone():
    rewards, values = AT_END.clone(), HALF.clone().requires_grad_()
    advantages, returns = gae(rewards, values, ALL, gamma=1.0, gae_lambda=0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert torch.equal(rewards, AT_END)
    one_column = torch.ones(2, 1)
    gae(one_column, one_column * 0, one_column.bool(), gamma=1.0, gae_lambda=1.0)
    assert torch.equal(one_column, torch.ones(2, 1))


def test_low_precision_is_lifted_to_float32():
    advantages, _ = gae(AT_END.bfloat16(), HALF.bfloat16(), ALL, gamma=1.0, gae_lambda=0.95)
    assert_close(advantages, torch.tensor([[0.45125, 0.475, 0.5]]))


def test_shapes_that_differ_are_refused_with_their_numbers():
    with pytest.raises(
        ValueError, match=r"one shape \[B, R\], got \(1, 3\), \(1, 1\) and \(1, 3\)"
    ):
        gae(AT_END, HALF[:, :1], ALL, gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"one per response, got \(3,\)"):
        gae(AT_END, HALF, ALL, gamma=1.0, gae_lambda=1.0, bootstrap_values=AT_END[0])
