"""Losses and numbers of pairs, by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    bradley_terry_loss,
    calibration_error,
    centering_penalty,
    length_bias,
    pair_credit,
    partial_correlation,
    reliability,
    wilson_interval,
)

LN3 = math.log(3.0)


def f64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_loss_by_hand():
    # σ(ln 3) = 3/4, σ(0) = 1/2, σ(-ln 3) = 1/4.
    loss = bradley_terry_loss(f64(LN3, 1, 0), f64(0, 1, LN3))
    assert_close(loss, -f64(0.75, 0.5, 0.25).log(), rtol=0, atol=1e-12)


def test_a_margin_is_taken_off_the_lead():
    # lead 2 ln 3 - ln 3 = ln 3; the second one has to make up for its margin.
    loss = bradley_terry_loss(f64(2 * LN3, 0), f64(0, 0), margin=f64(LN3, LN3))
    assert_close(loss, -f64(0.75, 0.25).log(), rtol=0, atol=1e-12)


def test_smoothing_is_a_share_of_the_reversed_pair():
    loss = bradley_terry_loss(f64(LN3), f64(0), label_smoothing=0.1)
    assert float(loss) == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25), abs=1e-12)


def test_huge_differences_stay_finite_and_exact():
    scores = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry_loss(scores, torch.zeros(2))
    assert loss.tolist() == [0.0, 1e4]
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [0.0, -1.0]


def test_gradient_by_hand():
    # d/dr_c of -log σ(Δ) is σ(Δ) - 1 = -1/4, of the centring term 2 (r_c + r_r) = 2 ln 3.
    chosen, rejected = f64(LN3).requires_grad_(), f64(0).requires_grad_()
    (bradley_terry_loss(chosen, rejected) + centering_penalty(chosen, rejected)).sum().backward()
    assert_close(chosen.grad, f64(-0.25 + 2 * LN3))
    assert_close(rejected.grad, f64(0.25 + 2 * LN3))


def test_losses_are_float32_for_coarser_scores():
    half = torch.tensor([1.0], dtype=torch.bfloat16)
    assert bradley_terry_loss(half, half).dtype == torch.float32
    assert centering_penalty(half, half).dtype == torch.float32


def test_centring_by_hand():
    assert centering_penalty(f64(1, -2), f64(2, 2)).tolist() == [9.0, 0.0]


def test_ties_count_half():
    credit = pair_credit(f64(1, 0, 2), f64(0, 1, 2))
    assert credit.tolist() == [1.0, 0.0, 0.5]
    assert pair_credit(f64(math.nan), f64(0)).isnan().all()


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_as_published(successes, count, low, high):
    found = wilson_interval(successes, count)
    assert found == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_reliability_and_its_error_by_hand():
    # σ(|Δ|): 0.5, 0.75, 0.75, 0.9; right: tie, yes, no, yes. Bins [0.5, 0.75), [0.75, 1].
    gaps = f64(0, LN3, -LN3, math.log(9))
    bins = reliability(gaps + 1, torch.ones_like(gaps), num_bins=2)
    assert [b.count for b in bins] in ([1, 3], [3, 1])  # 0.75 is on the border, to rounding
    bins = reliability(gaps + 1, torch.ones_like(gaps), num_bins=1)
    assert (bins[0].low, bins[0].high, bins[0].count) == (0.5, 1.0, 4)
    assert bins[0].confidence == pytest.approx((0.5 + 0.75 + 0.75 + 0.9) / 4)
    assert bins[0].accuracy == (0.5 + 1 + 0 + 1) / 4
    assert calibration_error(bins) == pytest.approx(0.725 - 0.625)


def test_the_error_weighs_bins_by_their_pairs():
    # Three sure and right (confidence 0.9), one unsure and wrong (0.6).
    nine, three_halves = math.log(9), math.log(1.5)
    bins = reliability(f64(nine, nine, nine, 0), f64(0, 0, 0, three_halves), num_bins=5)
    assert [b.count for b in bins][:2] in ([0, 1], [1, 0])
    assert calibration_error(bins) == pytest.approx((3 * 0.1 + 1 * 0.6) / 4)
    assert bins[2].confidence is bins[2].accuracy is None
    assert math.isnan(calibration_error(reliability(f64(), f64())))


def test_certainty_falls_into_the_last_bin():
    bins = reliability(f64(100), f64(0), num_bins=10)
    assert [b.count for b in bins] == [0] * 9 + [1]


def test_length_bias_of_a_model_that_scores_length():
    lengths = (f64(3, 1, 5), f64(1, 2, 4))
    found = length_bias(*lengths, *lengths)
    assert found.accuracy_chosen_longer == 1.0
    assert found.accuracy_chosen_shorter == 0.0
    assert found.share_chosen_longer == pytest.approx(2 / 3)
    assert found.longer_wins_accuracy == pytest.approx(2 / 3)
    assert found.correlation == pytest.approx(1.0)
    assert found.partial_correlation == pytest.approx(1.0)


def test_length_bias_of_a_model_that_knows_better():
    # Scores tell chosen from rejected and nothing else, but chosen answers are longer.
    found = length_bias(f64(1, 1, 1), f64(0, 0, 0), f64(5, 6, 7), f64(1, 2, 3))
    assert found.correlation is not None
    assert found.correlation > 0.9
    assert found.partial_correlation is None  # the label alone determines the score
    assert found.accuracy_chosen_shorter is None
    tied = length_bias(f64(1, 2), f64(0, 1), f64(4, 4), f64(4, 4))
    assert (tied.longer_wins_accuracy, tied.correlation) == (0.5, None)


def test_partial_correlation_by_hand():
    x, y, g = [1, 1, -1, -1, 0, 0], [1, -1, 1, -1, 0, 0], [0, 0, 0, 0, 1, -1]
    mixed_x = [a + b for a, b in zip(x, g, strict=True)]
    mixed_y = [a + b for a, b in zip(y, g, strict=True)]
    # Sums of squares: x·x = y·y = 4, g·g = 2, all orthogonal: r_xy = 2/6, r_xg² = 2/6.
    assert partial_correlation(mixed_x, mixed_y, g) == pytest.approx(0.0, abs=1e-12)
    assert partial_correlation(mixed_x, mixed_y, [7] * 6) == pytest.approx(2 / 6)
    assert partial_correlation([1, 1], [1, 2], [0, 1]) is None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bradley_terry_loss(f64(1, 2), f64(1)), "equal numbers"),
        (lambda: bradley_terry_loss(f64(1), f64(1), label_smoothing=0.5), "label_smoothing"),
        (lambda: wilson_interval(2, 1), "successes"),
        (lambda: wilson_interval(0, 0), "successes"),
        (lambda: wilson_interval(1, 2, confidence=1), "confidence"),
        (lambda: reliability(f64(1), f64(1), num_bins=0), "num_bins"),
        (lambda: length_bias(f64(), f64(), f64(), f64()), "at least one pair"),
        (lambda: length_bias(f64(1), f64(1), f64(1, 2), f64(1)), "equal numbers"),
    ],
)
def test_senseless_input_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
