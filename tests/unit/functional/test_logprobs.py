import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    entropy_from_logits,
    full_kl,
    logprobs_and_entropy,
    masked_mean,
    shifted_logprobs,
    token_logprobs,
)

LOGITS = torch.tensor([2.0, 0.0], dtype=torch.float64)
FIRST = torch.tensor(0)


def test_t11_logprobs_are_those_of_the_sampling_temperature():
    at_half = token_logprobs(LOGITS, FIRST, temperature=0.5).item()
    at_one = token_logprobs(LOGITS, FIRST, temperature=1.0).item()
    assert at_half == pytest.approx(-0.01815, abs=5e-6)
    assert at_one == pytest.approx(-0.12693, abs=5e-6)
    # What mixing the two would make of the ratio before any update.
    assert math.exp(at_one - at_half) == pytest.approx(0.897, abs=5e-4)
    assert math.exp(at_half - at_one) == pytest.approx(1.115, abs=5e-4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_t11_temperature_without_a_distribution_is_refused(temperature: float):
    with pytest.raises(ValueError, match="`temperature` must be above 0"):
        token_logprobs(LOGITS, FIRST, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_t44_logprobs_of_bfloat16_are_float32_and_never_above_zero(temperature: float):
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(64, 50, generator=generator)).bfloat16()
    ids = logits.argmax(-1)  # near 0, where a rounding would show as a positive number
    logprobs = token_logprobs(logits, ids, temperature=temperature)
    assert logprobs.dtype == torch.float32
    assert (logprobs <= 0).all()
    # Exactly what the rounded logits say in float32, not rounded again.
    assert_close(logprobs, token_logprobs(logits.float(), ids, temperature=temperature))


def test_t44_entropy_and_exact_kl_of_bfloat16_are_float32():
    generator = torch.Generator().manual_seed(0)
    logits, others = (3 * torch.randn(2, 8, 500, generator=generator)).bfloat16()
    entropy = entropy_from_logits(logits, temperature=0.9)
    divergence = full_kl(logits, others, temperature=0.9)
    assert entropy.dtype == divergence.dtype == torch.float32
    assert_close(entropy, entropy_from_logits(logits.float(), temperature=0.9))
    assert_close(divergence, full_kl(logits.float(), others.float(), temperature=0.9))


def test_t60_entropy_is_of_the_whole_distribution_and_masked():
    logits = torch.zeros(1, 8, 2)
    logits[:, 2:] = 100 * torch.arange(2)  # padding: one-hot, entropy 0
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0]]).bool()
    entropy = entropy_from_logits(logits, temperature=1.0)
    assert masked_mean(entropy, mask).item() == pytest.approx(0.69315, abs=5e-6)


def test_t60_entropy_stays_between_zero_and_that_of_the_uniform():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(100, 7, generator=generator, dtype=torch.float64)
    for temperature in (0.1, 1.0, 30.0):
        entropy = entropy_from_logits(logits, temperature=temperature)
        assert (entropy >= 0).all()
        assert (entropy <= math.log(7)).all()


def test_barred_tokens_give_no_nan_in_entropy_or_gradient():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits, temperature=1.0)
    entropy.sum().backward()
    assert_close(entropy, torch.tensor([math.log(2)]))
    assert_close(logits.grad, torch.zeros(1, 3))


def test_entropy_gradient_matches_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, temperature=0.7), logits)


@pytest.mark.parametrize("grad", [True, False])
def test_logprobs_and_entropy_agree_with_the_single_functions(grad: bool):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, generator=generator, requires_grad=True)
    ids = torch.tensor([0, 4, 2])
    logprobs, entropy = logprobs_and_entropy(logits, ids, temperature=0.7, entropy_grad=grad)
    assert_close(logprobs, token_logprobs(logits, ids, temperature=0.7), rtol=0, atol=0)
    assert_close(entropy, entropy_from_logits(logits, temperature=0.7), rtol=0, atol=0)
    assert logprobs.requires_grad
    assert entropy.requires_grad == grad


def test_t17_column_t_belongs_to_token_t_plus_1():
    # Each place is sure of another token: only the right pairing of place and token gives 0.
    input_ids = torch.tensor([[3, 1, 0, 2]])
    logits = torch.full((1, 4, 4), -50.0)
    for place, following in enumerate([1, 0, 2, 3]):
        logits[0, place, following] = 50.0
    assert_close(shifted_logprobs(logits, input_ids, temperature=1.0), torch.zeros(1, 3))
