import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import (
    last_index,
    mask_from_lengths,
    masked_mean,
    masked_sum,
    position_ids,
    response_mask,
    upcast,
)

NAN = float("nan")


def bools(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows).bool()


def test_t14_lengths_make_the_mask_where_no_end_token_would():
    # [a, b, EOS] and [a, b, c, d] cut by a stop string, in a buffer of width 6.
    expected = bools([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    assert torch.equal(mask_from_lengths(torch.tensor([3, 4]), 6), expected)


def test_t15_end_token_counts_and_equal_padding_does_not():
    ids = torch.tensor([[7, 8, 2, 2, 2, 2]])
    assert torch.equal(response_mask(ids, [2]), bools([[1, 1, 1, 0, 0, 0]]))


def test_t16_first_of_several_end_tokens_ends():
    assert torch.equal(response_mask(torch.tensor([[1, 9, 3, 5]]), [5, 9]), bools([[1, 1, 0, 0]]))


def test_t18_end_token_at_once_and_no_token_at_all():
    assert torch.equal(response_mask(torch.tensor([[2, 0]]), [2]), bools([[1, 0]]))
    assert torch.equal(mask_from_lengths(torch.tensor([0, 1]), 2), bools([[0, 0], [1, 0]]))


def test_no_end_tokens_leave_everything_valid():
    assert response_mask(torch.tensor([[1, 2, 3]]), []).all()


def test_last_index_skips_holes_and_marks_empty_rows():
    mask = bools([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    assert last_index(mask).tolist() == [2, -1, 0, 3]
    assert last_index(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [-1, -1]


def test_masked_sum_and_mean_never_read_what_is_masked():
    x = torch.tensor([[1.0, NAN], [2.0, 6.0], [NAN, NAN]], requires_grad=True)
    mask = bools([[1, 0], [1, 1], [0, 0]])
    assert masked_sum(x, mask).item() == 9.0
    assert masked_mean(x, mask).item() == 3.0
    assert masked_sum(x, mask, -1).tolist() == [1.0, 8.0, 0.0]
    assert masked_mean(x, mask, -1).tolist() == [1.0, 4.0, 0.0]
    masked_mean(x, mask).backward()
    third = 1 / 3
    assert_close(x.grad, torch.tensor([[third, 0.0], [third, third], [0.0, 0.0]]))


def test_masked_mean_of_nothing_is_zero_with_a_graph():
    x = torch.ones(2, 2, requires_grad=True)
    mean = masked_mean(x, torch.zeros(2, 2, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_masked_mean_of_flags_is_a_fraction():
    assert masked_mean(bools([[1, 0, 1, 1]]), bools([[1, 1, 1, 0]])).item() == pytest.approx(2 / 3)


def test_sums_of_bfloat16_are_made_in_float32():
    # In bfloat16 256 + 1 is 256: a sum in its own dtype would stop there.
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    total = masked_sum(ones, torch.ones(1, 1000, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total.item() == 1000.0


def test_upcast_keeps_what_is_precise_enough():
    single, double = torch.ones(1), torch.ones(1, dtype=torch.float64)
    assert upcast(single) is single
    assert upcast(double) is double
    assert upcast(single.half()).dtype == torch.float32


def test_t09_positions_start_at_the_first_real_token():
    mask = bools([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
