"""What holds of pairs and their scores, whatever the scores."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from ppo_lightning.functional import (
    bradley_terry_loss,
    calibration_error,
    length_bias,
    pair_credit,
    reliability,
    wilson_interval,
)

numbers = st.floats(-50, 50, allow_nan=False, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30)


def columns(found: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.tensor(found, dtype=torch.float64)
    return table[:, 0], table[:, 1]


@given(pairs, numbers)
def test_a_constant_added_to_all_scores_changes_no_loss(found, constant):
    chosen, rejected = columns(found)
    before = bradley_terry_loss(chosen, rejected)
    after = bradley_terry_loss(chosen + constant, rejected + constant)
    assert_close(after, before, rtol=1e-9, atol=1e-9)


@given(pairs)
def test_the_two_verdicts_have_probability_one_together(found):
    chosen, rejected = columns(found)
    forth, back = bradley_terry_loss(chosen, rejected), bradley_terry_loss(rejected, chosen)
    assert_close((-forth).exp() + (-back).exp(), torch.ones_like(forth))
    credits = pair_credit(chosen, rejected) + pair_credit(rejected, chosen)
    assert_close(credits, torch.ones_like(credits), rtol=0, atol=0)


@given(pairs, st.floats(0, 20), st.floats(0, 0.49))
def test_margin_and_smoothing_keep_the_loss_positive_and_finite(found, margin, smoothing):
    loss = bradley_terry_loss(*columns(found), margin=margin, label_smoothing=smoothing)
    assert loss.isfinite().all()
    assert (loss >= 0).all()


@given(pairs, st.integers(1, 20))
def test_bins_hold_every_pair_once_and_their_accuracy_is_the_whole(found, num_bins):
    chosen, rejected = columns(found)
    bins = reliability(chosen, rejected, num_bins=num_bins)
    filled = [b for b in bins if b.count]
    assert sum(b.count for b in bins) == len(found)
    mean = sum(b.count * b.accuracy for b in filled) / len(found)
    assert math.isclose(mean, float(pair_credit(chosen, rejected).mean()), abs_tol=1e-9)
    assert all(b.low - 1e-9 <= b.confidence <= b.high + 1e-9 for b in filled)
    assert 0 <= calibration_error(bins) <= 1


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_interval_holds_the_share_and_stays_inside(count, share):
    successes = min(float(count), count * share)
    low, high = wilson_interval(successes, count)
    assert 0 <= low <= successes / count + 1e-12
    assert successes / count - 1e-12 <= high <= 1
    wide = wilson_interval(successes, count, confidence=0.99)
    assert wide[0] <= low + 1e-12
    assert wide[1] >= high - 1e-12


lengths = st.integers(1, 100)


@given(st.lists(st.tuples(numbers, numbers, lengths, lengths), min_size=1, max_size=20))
def test_length_bias_is_the_same_in_any_order_and_in_any_unit(found):
    table = torch.tensor(found, dtype=torch.float64)
    first = length_bias(*table.unbind(1))
    turned = length_bias(*table.flip(0).unbind(1))
    longer = length_bias(*(table * torch.tensor([1, 1, 3, 3])).unbind(1))
    for name in ("accuracy_chosen_longer", "longer_wins_accuracy", "correlation"):
        values = [getattr(part, name) for part in (first, turned, longer)]
        if values[0] is None:
            assert values == [None] * 3
        else:
            assert max(values) - min(values) < 1e-6
