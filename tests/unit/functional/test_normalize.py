import math

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    Moments,
    ema_update,
    masked_moments,
    moments,
    normalise,
    running_update,
    whiten,
    zscore,
)
from tests.helpers.virtual_ranks import on_ranks

NAN = float("nan")
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("score", "num"), [(0.7, 4), (0.7, 3), (0.1, 10), (-1e6 / 3, 7)])
def test_t29_constant_scores_become_exactly_zero(score: float, num: int, dtype: torch.dtype):
    # Summing 0.7 three times and dividing by 3 misses 0.7 in float64: a plain mean would not do.
    scores = torch.full((num,), score, dtype=dtype)
    assert zscore(scores).tolist() == [0.0] * num
    mask = torch.ones(1, num, dtype=torch.bool)
    assert whiten(scores[None], mask).tolist() == [[0.0] * num]


@pytest.mark.parametrize("score", [0.7, 0.9, 1 / 3, 1e6 / 7])
@pytest.mark.parametrize("update", ["running", "ema", "ema_bias_corrected"])
def test_t29_constant_first_and_later_batches_of_a_moving_normaliser(update: str, score: float):
    scores, state = torch.full((3,), score, dtype=torch.float64), Moments()
    for _ in range(5):
        if update == "running":
            state = running_update(state, scores)
        else:
            corrected = update == "ema_bias_corrected"
            # 0.6 * 0.9 + 0.4 * 0.9 is not 0.9: the step has to be written as a shift.
            state = ema_update(state, scores, decay=0.6, bias_corrected=corrected)
        assert normalise(scores, state).tolist() == [0.0, 0.0, 0.0]


def test_t32_padding_takes_no_part_in_whitening():
    advantages = torch.tensor([[1.0, 3.0], [2.0, NAN]])
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    white = whiten(advantages, mask)
    assert_close(white[:, 0], torch.tensor([-1.2247449, 0.0]), rtol=0, atol=1e-6)
    assert_close(white[0, 1], torch.tensor(1.2247449), rtol=0, atol=1e-6)
    assert white[1, 1].item() == 0.0
    pool = moments(advantages, mask)
    assert (pool.count, pool.mean) == (3, 2)
    assert math.sqrt(pool.var) == pytest.approx(0.8165, abs=5e-5)


def test_t32_ranks_share_one_mean_and_one_spread():
    rows, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.ones(1, 2, dtype=torch.bool)
    white = on_ranks(lambda reduce, k: whiten(rows[k : k + 1], mask, reduce=reduce), 2)
    root = math.sqrt(5)  # deviations -3, -1, 1, 3 from the mean 4
    expected = torch.tensor([[-3 / root, -1 / root], [1 / root, 3 / root]])
    assert_close(torch.cat(white), expected, rtol=0, atol=1e-6)
    pools = on_ranks(lambda reduce, k: moments(rows[k], reduce=reduce), 2)
    assert pools == [Moments(4, 4, 5)] * 2


def test_t32_a_rank_without_tokens_reduces_as_often_as_the_others():
    rows = torch.tensor([[1.0, 3.0], [NAN, NAN]])
    mask = torch.tensor([[1, 1], [0, 0]]).bool()
    white = on_ranks(lambda reduce, k: whiten(rows[k][None], mask[k][None], reduce=reduce), 2)
    assert_close(torch.cat(white), torch.tensor([[-1.0, 1.0], [0.0, 0.0]]), rtol=0, atol=1e-6)


def test_t33_a_single_number_normalises_to_zero():
    one = torch.tensor([3.5])
    assert zscore(one).tolist() == [0.0]
    assert whiten(one[None], torch.tensor([[True]])).tolist() == [[0.0]]
    assert normalise(one, running_update(Moments(), one)).tolist() == [0.0]


def test_t33_nothing_valid_is_no_error():
    empty = torch.tensor([[NAN, NAN]])
    assert whiten(empty, torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0, 0.0]]
    assert moments(empty, torch.zeros(1, 2, dtype=torch.bool)) == Moments()
    state = Moments(3, 1.0, 2.0)
    nothing = torch.zeros(0)
    assert running_update(state, nothing) == state
    assert ema_update(state, nothing, decay=0.9) == state


def test_small_spread_on_a_large_mean_keeps_its_digits():
    # E[x²] - E[x]² in float64 would be off by half here: 1e18 has a last place of 128.
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2], dtype=torch.float64)
    assert moments(values).var == pytest.approx(2 / 3, rel=1e-12)
    parts = on_ranks(lambda reduce, k: moments(values[k : k + 1], reduce=reduce), 3)
    assert parts[0].var == pytest.approx(2 / 3, rel=1e-12)


def test_whitening_can_keep_the_mean():
    values, mask = torch.tensor([[9.0, 11.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert_close(whiten(values, mask, shift_mean=False), torch.tensor([[9.0, 11.0]]))
    assert_close(whiten(4 * values, mask, shift_mean=False), torch.tensor([[39.0, 41.0]]))


def test_excluded_scores_are_normalised_but_do_not_count():
    scores, mask = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert_close(zscore(scores, mask), torch.tensor([-1.0, 1.0, 98.0]))


def test_running_pool_over_ranks_equals_one_pool():
    batches = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([10.0, -3.0, 0.5])]

    def pool(reduce: object, k: int) -> Moments:
        state = Moments()
        for batch in batches:
            part = batch[:1] if k == 0 else batch[1:]
            state = running_update(state, part, reduce=reduce)  # type: ignore[arg-type]
        return state

    first, second = on_ranks(pool, 2)
    whole = moments(torch.cat(batches))
    assert first == second
    assert (first.count, first.mean) == pytest.approx((whole.count, whole.mean), rel=1e-12)
    assert first.var == pytest.approx(whole.var, rel=1e-12)


def test_plain_moving_average_follows_batches_apart():
    state = ema_update(Moments(), torch.tensor([0.0, 2.0]), decay=0.75)
    assert state == Moments(1, 1.0, 1.0)
    state = ema_update(state, torch.tensor([5.0, 5.0]), decay=0.75)
    assert state == Moments(2, 2.0, 0.75)


def test_bias_corrected_moving_average_sees_the_drift_between_batches():
    state = Moments()
    for batch in ([0.0, 2.0], [5.0, 5.0]):
        state = ema_update(state, torch.tensor(batch), decay=0.5, bias_corrected=True)
    # Weights 1/3 and 2/3: mean 11/3, second moment 2/3 + 50/3 = 52/3.
    assert state.mean == pytest.approx(11 / 3)
    assert state.var == pytest.approx(52 / 3 - (11 / 3) ** 2)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_outside_its_range_is_refused(decay: float):
    with pytest.raises(ValueError, match=r"`decay` must lie in \[0, 1\)"):
        ema_update(Moments(), torch.ones(1), decay=decay)


def test_several_quantities_in_one_pass():
    values = torch.tensor([[[1.0, 3.0, NAN]], [[10.0, 10.0, 5.0]]])
    count, mean, var = masked_moments(values, torch.tensor([[True, True, False]]))
    assert (count.item(), mean.tolist(), var.tolist()) == (2, [2.0, 10.0], [1.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_are_float32_or_better(dtype: torch.dtype):
    scores = torch.tensor([1.0, 2.0], dtype=dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert zscore(scores).dtype == wanted
    assert whiten(scores[None], torch.ones(1, 2, dtype=torch.bool)).dtype == wanted
