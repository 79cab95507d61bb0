import math
import pickle
import warnings

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.functional import entropy_from_logits, mask_from_lengths, masked_sum
from ppo_lightning.metrics import RolloutStats, Sums, deviation, metric_specs, quotient

NAMES = ("total", "squares", "count")
VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, -3.0, 0.5])


def totals_of(values):
    sums = Sums(NAMES, maxima=["high"], minima=["low"])
    sums.add(total=values.sum(), squares=(values * values).sum(), count=len(values))
    sums.add(high=values.max(), low=values.min())
    return sums


def test_t59_mean_weighs_every_sample_alike():
    sums = Sums(["total", "count"])
    for value, count in ((0.7, 256), (0.8, 256), (0.9, 10)):
        sums.add(total=torch.tensor(value, dtype=torch.float64) * count, count=count)
    mean = quotient(sums.compute(), "total", "count")
    assert mean == pytest.approx(0.75287, abs=5e-6)
    assert mean == pytest.approx((0.7 * 256 + 0.8 * 256 + 0.9 * 10) / 522, rel=1e-15)


def test_t59_ranks_merge_into_what_one_process_counts():
    # Means 7/3 and 1.83, largest 4 and 8: a mean of the largest would be 6, of the means 2.08.
    one, two = totals_of(VALUES[:3]), totals_of(VALUES[3:])
    one.merge_state(two)
    merged, whole = one.compute(), totals_of(VALUES).compute()
    assert merged == whole
    assert merged["high"] == 8
    assert merged["low"] == -3
    assert quotient(merged, "total", "count") == pytest.approx(12.5 / 6)


def test_t59_extremes_are_those_of_all_that_was_added():
    sums = Sums([], maxima=["high"], minima=["low"])
    for value in (2.0, 5.0, torch.tensor(-1.0), 3.0):
        sums.add(high=value, low=value)
    sums.add(high=4.0)
    assert sums.compute() == {"high": 5, "low": -1}


def test_t59_deviation_is_pooled():
    one, two = totals_of(torch.tensor([0.0, 2.0])), totals_of(torch.tensor([10.0, 12.0]))
    one.merge_state(two)
    # Around the mean 6: (36 + 16 + 16 + 36) / 4 = 26; the deviation within each rank is 1.
    assert deviation(one.compute(), *NAMES) == pytest.approx(math.sqrt(26), rel=1e-15)


def test_t60_entropy_is_ln_2_per_valid_token_and_padding_does_not_count():
    logits = torch.zeros(2, 4, 2)
    logits[:, 1:] = torch.tensor([50.0, 0.0])  # padding, which would pull the mean to 0
    mask = mask_from_lengths(torch.tensor([1, 1]), 4)
    sums = Sums(["entropy", "tokens"])
    entropy = entropy_from_logits(logits, temperature=1.0)
    sums.add(entropy=masked_sum(entropy, mask), tokens=mask.sum())
    assert quotient(sums.compute(), "entropy", "tokens") == pytest.approx(math.log(2), abs=1e-6)


def test_t60_sampled_estimate_has_a_name_of_its_own():
    specs = metric_specs(RolloutStats)
    assert specs["entropy"].name == "rollout/entropy"
    assert "whole next-token distribution" in specs["entropy"].formula
    assert specs["sampled_nll"].name == "rollout/sampled_nll"
    assert "not the entropy" in specs["sampled_nll"].formula


def test_sums_are_exact_where_float32_is_not():
    sums = Sums(["big", "many"])
    for _ in range(3):
        sums.add(big=2**24 + 1, many=torch.tensor(2**30 + 1))
    sums.add(big=torch.tensor(2**24 + 1), many=torch.tensor(0.5))
    assert sums.compute() == {"big": 4 * (2**24 + 1), "many": 3 * (2**30 + 1) + 0.5}


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, torch.tensor(True), torch.tensor([1]), torch.tensor(1.0, dtype=torch.bfloat16)],
)
def test_every_kind_of_number_is_taken(value):
    sums = Sums(["a", "b"], maxima=["c"])
    sums.add(a=value, c=value)
    assert sums.compute() == {"a": 1, "b": 0, "c": 1}


def test_values_carry_no_gradient():
    x = torch.tensor(2.0, requires_grad=True)
    sums = Sums(["a"], maxima=["b"])
    sums.add(a=x * 2, b=x)
    assert not sums.total.requires_grad
    assert not sums.largest.requires_grad


def test_add_reads_nothing_back_from_the_device():
    # Tensors on `meta` hold no numbers: reading one would raise.
    sums = Sums(["a", "b"], maxima=["c"], minima=["d"]).to("meta")
    value = torch.ones((), device="meta")
    sums.add(a=value, b=3, c=value, d=value)
    assert sums.total.shape == sums.largest.shape == (2,)


def test_nan_stays_visible():
    sums = Sums(NAMES, maxima=["high"], minima=["low"])
    sums.add(total=torch.tensor(math.nan), squares=math.nan, count=1, high=1.0, low=1.0)
    sums.add(total=1.0, squares=1.0, count=1, high=torch.tensor(math.nan), low=math.nan)
    totals = sums.compute()
    assert math.isnan(totals["high"])
    assert math.isnan(totals["low"])
    assert math.isnan(quotient(totals, "total", "count"))
    assert math.isnan(deviation(totals, *NAMES))


def test_nothing_counted_is_nothing_measured():
    totals = Sums(NAMES, maxima=["high"], minima=["low"]).compute()
    assert totals == {"total": 0, "squares": 0, "count": 0}
    assert quotient(totals, "total", "count") is None
    assert deviation(totals, *NAMES) is None


def test_rank_without_rows_is_no_mistake():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        idle = Sums(["a"], maxima=["b"])
        idle.compute()
    busy = Sums(["a"], maxima=["b"])
    busy.add(a=2, b=3)
    busy.merge_state(idle)
    assert busy.compute() == {"a": 2, "b": 3}


def test_reset_starts_anew():
    sums = totals_of(VALUES)
    sums.compute()
    sums.reset()
    assert sums.compute() == Sums(NAMES, maxima=["high"], minima=["low"]).compute()
    sums.add(total=1.0)
    assert sums.compute()["total"] == 1


def test_constant_values_have_no_deviation():
    values = torch.full((1000,), 0.1, dtype=torch.float64)
    assert deviation(totals_of(values).compute(), *NAMES) == pytest.approx(0, abs=1e-8)


def test_module_moves_and_saves_no_totals():
    module = torch.nn.Module()
    module.sums = totals_of(VALUES)
    assert module.state_dict() == {}
    module.to(torch.bfloat16)
    assert module.sums.total.dtype == torch.float64
    copy = pickle.loads(pickle.dumps(module.sums))
    assert_close(copy.total, module.sums.total)


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean `total`"):
        Sums(NAMES).add(totl=1.0)


def test_several_numbers_are_refused():
    with pytest.raises(ValueError, match=r"`total` must be one number, got shape \(2,\)"):
        Sums(NAMES).add(total=torch.ones(2))


def test_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        Sums(["a"], maxima=["a"])
