import pytest
import torch

from ppo_lightning.functional import (
    adapted_kl_coef,
    adapted_penalty_coef,
    mask_from_lengths,
    masked_mean,
    masked_sum,
)

SETTINGS = {"target": 6.0, "horizon": 10_000, "num_responses": 256}


def test_t26_controller_number():
    assert adapted_kl_coef(0.1, 9.0, **SETTINGS) == pytest.approx(0.100512, rel=1e-9)


def test_t26_kl_per_response_and_per_token_are_two_numbers():
    kl, mask = torch.full((2, 10), 0.1), mask_from_lengths(torch.tensor([10, 2]), 10)
    assert masked_sum(kl, mask, -1).mean().item() == pytest.approx(0.6)
    assert masked_mean(kl, mask).item() == pytest.approx(0.1)


@pytest.mark.parametrize("key", ["target", "horizon"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_t26_senseless_settings_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=f"`{key}` must be above 0"):
        adapted_kl_coef(0.1, 9.0, **SETTINGS | {key: value})


def test_t26_penalty_target_must_be_positive():
    with pytest.raises(ValueError, match="`target` must be above 0"):
        adapted_penalty_coef(0.1, 9.0, target=0.0)


def test_t26_horizon_that_could_turn_the_sign_is_refused():
    with pytest.raises(ValueError, match=r"`horizon` must exceed 0.2 times the 1000 responses"):
        adapted_kl_coef(0.1, 0.0, target=6.0, horizon=200, num_responses=1000)


def test_error_is_bounded_both_ways_and_zero_at_the_target():
    high, low = 0.1 * (1 + 0.2 * 0.0256), 0.1 * (1 - 0.2 * 0.0256)
    assert adapted_kl_coef(0.1, 600.0, **SETTINGS) == pytest.approx(high)
    assert adapted_kl_coef(0.1, -3.0, **SETTINGS) == pytest.approx(low)
    assert adapted_kl_coef(0.1, 6.0, **SETTINGS) == 0.1
    assert adapted_kl_coef(0.1, 6.6, **SETTINGS) == pytest.approx(0.1 * (1 + 0.1 * 0.0256))


def test_a_kl_that_is_nan_moves_nothing():
    assert adapted_kl_coef(0.1, float("nan"), **SETTINGS) == 0.1
    assert adapted_penalty_coef(0.1, float("nan"), target=1.0) == 0.1


def test_penalty_doubles_halves_and_stays():
    assert adapted_penalty_coef(1.0, 1.6, target=1.0) == 2.0
    assert adapted_penalty_coef(1.0, 0.6, target=1.0) == 0.5
    assert adapted_penalty_coef(1.0, 1.5, target=1.0) == 1.0
