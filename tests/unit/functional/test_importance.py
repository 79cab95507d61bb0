"""Truncated importance weights against numbers by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import truncated_importance_weights

MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_weights_by_hand():
    """π over μ: 1/2 over 1/4 is 2, 3/4 over 1/4 is 3 (cut at 2.5), 1/8 over 1/2 is 1/4."""
    logprobs = torch.tensor([[1 / 2, 3 / 4, 1 / 8], [0.3, 1.0, 1.0]]).double().log()
    sampler = torch.tensor([[1 / 4, 1 / 4, 1 / 2], [0.3, 1.0, 1.0]]).double().log()
    weights, capped = truncated_importance_weights(logprobs, sampler, MASK, cap=2.5)
    expected = torch.tensor([[2.0, 2.5, 0.25], [1.0, 0.0, 0.0]]).double()
    assert_close(weights, expected, rtol=0, atol=1e-15)
    assert capped.tolist() == [[False, True, False], [False, False, False]]


def test_one_policy_has_weights_of_exactly_one_and_padding_is_inert():
    logprobs = -torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) * 20
    logprobs[~MASK] = math.nan
    weights, capped = truncated_importance_weights(logprobs, logprobs, MASK, cap=1.0)
    assert weights.equal(MASK.float())
    assert not capped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_difference_overflows_a_nan_stays_and_nothing_has_a_gradient(dtype):
    logprobs = torch.tensor([[0.0, -500.0, math.nan]], dtype=dtype, requires_grad=True)
    sampler = torch.tensor([[-500.0, 0.0, 0.0]], dtype=dtype)
    ones = torch.ones(1, 3, dtype=torch.bool)
    weights, capped = truncated_importance_weights(logprobs, sampler, ones, cap=2.0)
    assert weights[0, :2].tolist() == [2.0, 0.0]
    assert weights[0, 2].isnan()
    assert capped.tolist() == [[True, False, False]]
    assert weights.dtype == torch.float32
    assert not weights.requires_grad


def test_weighted_means_over_what_another_policy_wrote_are_those_of_the_policy():
    """E_μ[w·f] = E_π[f], on three tokens that are counted out; the cap takes from the largest."""
    policy, sampler = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    value = torch.tensor([1.0, -2.0, 4.0])
    ones = torch.ones(1, 3, dtype=torch.bool)
    for cap, expected in ((10.0, float((policy * value).sum())), (2.0, 0.4 - 0.6 + 0.8)):
        weights, _ = truncated_importance_weights(
            policy.log()[None], sampler.log()[None], ones, cap=cap
        )
        assert float((sampler * weights[0] * value).sum()) == pytest.approx(expected, abs=1e-6)
