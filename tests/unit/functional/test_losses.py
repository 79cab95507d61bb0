import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_lightning.functional import (
    aggregate,
    log_ratio,
    penalty_loss_per_token,
    policy_loss_per_token,
    value_loss_per_token,
)

NAN = float("nan")
ONE = torch.ones(1, 1, dtype=torch.bool)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def all_valid(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_policy_loss_in_and_out_of_the_band():
    # Ratio 1.5 and 0.5 against both signs of the advantage, ε = 0.25.
    new = row(1.5, 1.5, 0.5, 0.5).log().requires_grad_()
    advantages = row(1, -1, 1, -1)
    terms = policy_loss_per_token(
        new, row(0, 0, 0, 0), advantages, all_valid(new), clip_low=0.25, clip_high=0.25
    )
    terms.loss.sum().backward()
    assert_close(terms.loss, row(-1.25, 1.5, -0.5, 0.75))
    assert terms.outside.tolist() == [[True] * 4]
    assert terms.clip_active.tolist() == [[True, False, False, True]]
    # d(-ρA)/d(log π) = -ρA where the plain term is in force, else 0.
    assert_close(new.grad, row(0, 1.5, -0.5, 0))


def test_asymmetric_band():
    new = row(1.25, 0.75).log()
    terms = policy_loss_per_token(
        new, row(0, 0), row(1, -1), all_valid(new), clip_low=0.125, clip_high=0.5
    )
    assert_close(terms.loss, row(-1.25, 0.875))
    assert terms.outside.tolist() == [[False, True]]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    new = row(5, 5, 2).log().requires_grad_()
    terms = policy_loss_per_token(
        new, row(0, 0, 0), row(-1, 1, -1), all_valid(new), clip_low=0.2, clip_high=0.2, dual_clip=3
    )
    terms.loss.sum().backward()
    assert_close(terms.loss, row(3, -1.2, 2))
    assert terms.dual_clipped.tolist() == [[True, False, False]]
    assert_close(new.grad, row(0, 0, 2))


@pytest.mark.parametrize(("advantage", "loss"), [(-1.0, 22026.5), (1.0, -1.2)])
def test_t41_large_log_ratio_gives_a_bounded_loss(advantage: float, loss: float):
    new = torch.zeros(1, 1, requires_grad=True)
    terms = policy_loss_per_token(
        new, new.detach() - 100, new.detach() + advantage, ONE, clip_low=0.2, clip_high=0.2
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, rel=1e-5)
    assert new.grad is not None
    assert new.grad.item() == 0.0
    assert terms.ratio.item() == pytest.approx(math.exp(10), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_t41_penalty_stays_finite_too(estimator: str):
    new = torch.zeros(1, 1, requires_grad=True)
    terms = penalty_loss_per_token(
        new, new.detach() - 100, new.detach() + 1, ONE, penalty_coef=1.0, estimator=estimator
    )
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()


@pytest.mark.parametrize(("estimator", "gradient"), [("k1", -1.0), ("k2", 100.0)])
def test_penalty_without_exponentials_pulls_back_from_any_distance(estimator: str, gradient: float):
    new = row(0).requires_grad_()
    terms = penalty_loss_per_token(
        new, row(-100), row(0), ONE, penalty_coef=1.0, estimator=estimator
    )
    terms.loss.sum().backward()
    assert_close(new.grad, row(gradient))


def test_t41_nan_inputs_stay_visible():
    nan = torch.full((1, 1), NAN)
    zero, settings = torch.zeros(1, 1), {"clip_low": 0.2, "clip_high": 0.2}
    for new, old, advantage in ((nan, zero, zero), (zero, nan, zero), (zero, zero, nan)):
        assert policy_loss_per_token(new, old, advantage, ONE, **settings).loss.isnan().all()
        penalised = penalty_loss_per_token(new, old, advantage, ONE, penalty_coef=1.0)
        assert penalised.loss.isnan().all()
        value = value_loss_per_token(new, old, advantage, ONE, clip_range=0.2)
        assert value.loss.isnan().all() or old.isnan().all()
    assert log_ratio(nan, zero).isnan().all()


def test_t41_log_ratio_stops_its_gradient_outside_the_bound():
    new = row(-20, 3, 20).requires_grad_()
    bounded = log_ratio(new, row(0, 0, 0))
    bounded.sum().backward()
    assert bounded.tolist() == [[-10, 3, 10]]
    assert_close(new.grad, row(0, 1, 0))
    assert log_ratio(new, row(0, 0, 0), clamp=None).tolist() == [[-20, 3, 20]]


def test_penalty_takes_the_exact_kl_only_with_full():
    x, settings = row(0), {"penalty_coef": 2.0}
    terms = penalty_loss_per_token(x, x, x + 1, ONE, estimator="full", kl=row(3), **settings)
    assert terms.loss.item() == -1 + 2 * 3
    for estimator, kl in (("full", None), ("k3", row(3))):
        with pytest.raises(ValueError, match="if and only if `estimator` is 'full'"):
            penalty_loss_per_token(x, x, x, ONE, estimator=estimator, kl=kl, **settings)


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"), [(1.0, 0.64, 0.0, True), (0.1, 0.81, -1.8, False)]
)
def test_t36_value_clipping(value: float, loss: float, gradient: float, clipped: bool):
    values = row(value).requires_grad_()
    terms = value_loss_per_token(values, row(0), row(1), ONE, clip_range=0.2)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
    assert terms.clipped.item() is clipped


def test_t36_value_clipping_can_be_switched_off():
    terms = value_loss_per_token(row(1), row(0), row(1), ONE, clip_range=None)
    assert terms.loss.item() == 0.0
    assert terms.clipped.tolist() == [[False]]


def test_values_inside_the_range_are_never_counted_as_clipped():
    # -0.1 + (0.05 - (-0.1)) is 0.05000000000000002: an error larger by a rounding is no clip.
    terms = value_loss_per_token(row(0.05), row(-0.1), row(0), ONE, clip_range=0.2)
    assert terms.clipped.tolist() == [[False]]
    assert terms.loss.item() == 0.05 * 0.05


def test_huber_joins_the_square_smoothly_and_then_grows_linearly():
    values = row(0.5, 1.0, 3.0).requires_grad_()
    zeros = torch.zeros_like(values)
    terms = value_loss_per_token(
        values, zeros, zeros, all_valid(values), clip_range=None, huber_delta=1.0
    )
    terms.loss.sum().backward()
    assert_close(terms.loss, row(0.25, 1.0, 5.0))
    assert_close(values.grad, row(1, 2, 2))


def test_t39_divisor_is_the_token_count_of_the_whole_step():
    losses = [torch.ones(1, 4), torch.tensor([[4.0, 9.0, 9.0, 9.0]])]
    masks = [torch.ones(1, 4).bool(), torch.tensor([[1, 0, 0, 0]]).bool()]
    shares = [
        aggregate(loss, mask, mode="token", num_tokens=5)
        for loss, mask in zip(losses, masks, strict=True)
    ]
    assert sum(shares).item() == pytest.approx(1.6)
    assert aggregate(torch.cat(losses), torch.cat(masks), mode="token").item() == pytest.approx(1.6)
    # A mean of the two means would be 2.5; rows weigh alike only when asked for.
    by_row = aggregate(torch.cat(losses), torch.cat(masks), mode="sequence")
    assert by_row.item() == 2.5


def test_t39_averaging_strategies_divide_the_count_by_the_ranks():
    # One token in all on two ranks: each sees a count of 1/2, and their average is the loss.
    loss, mask = torch.tensor([[3.0]]), torch.tensor([[True]])
    ranks = [aggregate(loss, m, mode="token", num_tokens=0.5) for m in (mask, ~mask)]
    assert sum(ranks).item() / 2 == 3.0


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("counts", [{}, {"num_tokens": 0, "num_sequences": 0}])
def test_nothing_valid_gives_zero_with_a_graph(mode: str, counts: dict[str, int]):
    loss = torch.full((2, 2), NAN, requires_grad=True)
    total = aggregate(loss, torch.zeros(2, 2, dtype=torch.bool), mode=mode, **counts)
    total.backward()
    assert total.item() == 0.0
    assert loss.grad is not None
    assert not loss.grad.any()


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'token' or 'sequence', got 'mean'"):
        aggregate(row(1), ONE, mode="mean")  # type: ignore[arg-type]


def test_losses_of_low_precision_are_float32():
    half = torch.zeros(1, 1, dtype=torch.bfloat16)
    settings = {"clip_low": 0.2, "clip_high": 0.2}
    assert policy_loss_per_token(half, half, half, ONE, **settings).loss.dtype == torch.float32
    assert value_loss_per_token(half, half, half, ONE, clip_range=1).loss.dtype == torch.float32


def half(number: float) -> Tensor:
    return torch.tensor([[number]], dtype=torch.bfloat16)


def test_t44_the_ratio_of_bfloat16_is_made_in_float32():
    # -1/128 and -3 are bfloat16; their difference, 2.9921875, is not, and would become 3.
    settings = {"clip_low": 0.2, "clip_high": 0.2}
    clipped = policy_loss_per_token(half(-(2**-7)), half(-3), half(1), ONE, **settings)
    penalised = penalty_loss_per_token(half(-(2**-7)), half(-3), half(1), ONE, penalty_coef=0.0)
    for ratio in (clipped.ratio, penalised.ratio, -penalised.loss):
        assert ratio.item() == pytest.approx(math.exp(2.9921875), rel=1e-6)


def test_t44_the_error_of_bfloat16_values_is_made_in_float32():
    terms = value_loss_per_token(half(-(2**-7)), half(0), half(3), ONE, clip_range=None)
    assert terms.loss.item() == 3.0078125**2  # exact in binary; 9 if the error were rounded


def test_t44_equal_bfloat16_logprobs_have_a_ratio_of_exactly_one():
    logprobs = -torch.rand(1, 500, generator=torch.Generator().manual_seed(0)).bfloat16() * 9
    settings = {"clip_low": 0.2, "clip_high": 0.2}
    mask = torch.ones(1, 500, dtype=torch.bool)
    terms = policy_loss_per_token(logprobs, logprobs.clone(), logprobs, mask, **settings)
    assert (terms.ratio == 1).all()
    assert terms.ratio.dtype == torch.float32
