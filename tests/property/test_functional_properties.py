"""What must hold for any numbers: padding is inert, cuts and ranks change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from ppo_lightning import functional as F
from tests.helpers.virtual_ranks import on_ranks

QUICK = settings(max_examples=25)
SEEDS = st.integers(0, 2**32 - 1)
FILLS = st.sampled_from([100.0, -100.0, float("nan"), float("inf")])
NAMES = (
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "advantages",
    "values",
    "old_values",
    "returns",
)


class Batch:
    """Random tensors of one shape, with a mask that may have holes and empty rows."""

    def __init__(self, seed: int, *, holes: bool = True, rows: int | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shape = (rows or self.integer(1, 4), self.integer(1, 6))
        lengths = torch.randint(0, shape[1] + 1, shape[:1], generator=self.generator)
        self.mask = F.mask_from_lengths(lengths, shape[1])
        if holes:
            self.mask &= torch.rand(shape, generator=self.generator) < 0.7
        self.tensors = {name: self.normal(*shape) for name in NAMES}
        self.scores = self.normal(shape[0])

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def filled(self, padding: float) -> dict[str, Tensor]:
        """Leaf copies with ``padding`` outside the mask."""
        return {
            name: torch.where(self.mask, x, padding).requires_grad_()
            for name, x in self.tensors.items()
        }


def policy(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    return F.policy_loss_per_token(
        x["logprobs"],
        x["old_logprobs"],
        x["advantages"],
        mask,
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=2.0,
    ).loss


def penalty(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    return F.penalty_loss_per_token(
        x["logprobs"], x["old_logprobs"], x["advantages"], mask, penalty_coef=0.5
    ).loss


def value(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    return F.value_loss_per_token(
        x["values"], x["old_values"], x["returns"], mask, clip_range=0.2, huber_delta=1.0
    ).loss


def kl_loss(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    return F.kl_loss_per_token(x["logprobs"], x["ref_logprobs"], x["old_logprobs"], mask)


def shaping(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    kl = F.kl_estimate(x["old_logprobs"], x["ref_logprobs"], estimator="k3")
    rewards = F.token_rewards(scores, kl, mask, kl_coef=0.1, token_scores=x["returns"])
    advantages, returns = F.gae(
        rewards, x["old_values"], mask, gamma=0.9, gae_lambda=0.8, bootstrap_values=scores
    )
    last = F.token_rewards(scores, kl, mask, kl_coef=0.1, placement="last")
    return torch.stack([rewards, last, advantages, returns, F.whiten(x["advantages"], mask)])


def summary(x: dict[str, Tensor], mask: Tensor, scores: Tensor) -> Tensor:
    pool = F.moments(x["returns"], mask)
    return torch.stack(
        [
            F.explained_variance(x["old_values"], x["returns"], mask),
            F.approx_kl(x["logprobs"], x["old_logprobs"], mask),
            torch.tensor(pool.mean, dtype=torch.float64),
            torch.tensor(pool.var, dtype=torch.float64),
        ]
    )


LOSSES = [policy, penalty, value, kl_loss]


@pytest.mark.parametrize("function", [*LOSSES, shaping, summary])
@given(seed=SEEDS, fill=FILLS)
@QUICK
def test_padding_content_changes_nothing(function: Callable[..., Tensor], seed: int, fill: float):
    batch = Batch(seed)
    plain, padded = batch.filled(0.0), batch.filled(fill)
    outputs = [function(x, batch.mask, batch.scores) for x in (plain, padded)]
    assert_close(outputs[1], outputs[0], rtol=0, atol=0, equal_nan=function is summary)
    if outputs[0].requires_grad:
        for output in outputs:
            output.sum().backward()
        for name in NAMES:
            assert_close(padded[name].grad, plain[name].grad, rtol=0, atol=0)
            if plain[name].grad is not None:
                assert not plain[name].grad[~batch.mask].any()


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize("function", LOSSES)
@given(seed=SEEDS)
@QUICK
def test_cutting_into_microbatches_leaves_the_gradient_alone(
    function: Callable[..., Tensor], mode: str, seed: int
):
    batch = Batch(seed, rows=6)
    counts = {"num_tokens": batch.mask.sum(), "num_sequences": batch.mask.any(-1).sum()}
    sizes = [1, 0, 3, 2] if batch.integer(0, 1) else [2] * 3
    whole, cut = batch.filled(0.0), batch.filled(0.0)
    loss = function(whole, batch.mask, batch.scores)
    F.aggregate(loss, batch.mask, mode=mode).backward()
    for rows in torch.arange(6).split(sizes):
        part = {name: x[rows] for name, x in cut.items()}
        loss = function(part, batch.mask[rows], batch.scores[rows])
        F.aggregate(loss, batch.mask[rows], mode=mode, **counts).backward()
    for name in NAMES:
        assert_close(cut[name].grad, whole[name].grad, rtol=1e-12, atol=1e-14)


@given(seed=SEEDS, gamma=st.floats(0, 1))
@QUICK
def test_returns_at_lambda_one_ignore_the_values(seed: int, gamma: float):
    batch = Batch(seed)
    x = batch.tensors
    kwargs = {"gamma": gamma, "gae_lambda": 1.0, "bootstrap_values": batch.scores}
    _, returns = F.gae(x["returns"], x["values"], batch.mask, **kwargs)
    _, others = F.gae(x["returns"], 7 * x["old_values"] - 3, batch.mask, **kwargs)
    assert_close(others, returns, rtol=1e-9, atol=1e-9)


@given(seed=SEEDS)
@QUICK
def test_a_row_with_holes_is_the_row_closed_up(seed: int):
    batch = Batch(seed)
    mask, x = batch.mask, batch.tensors
    results = torch.stack(F.gae(x["returns"], x["values"], mask, gamma=0.9, gae_lambda=0.7))
    for row, valid in enumerate(mask):
        closed = [x[name][row, valid][None] for name in ("returns", "values")]
        full = torch.ones_like(closed[0], dtype=torch.bool)
        alone = torch.stack(F.gae(*closed, full, gamma=0.9, gae_lambda=0.7))
        assert torch.equal(results[:, row, valid], alone[:, 0])
        assert not results[:, row, ~valid].any()


@given(log_ratios=st.lists(st.floats(-50, 50), min_size=1, max_size=20))
@QUICK
def test_k3_is_never_negative(log_ratios: list[float]):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(log_ratios, dtype=dtype)
        small = x * 1e-7  # where exp(-x) - 1 would cancel to noise
        for ratio in (x, small):
            assert (F.kl_estimate(ratio, torch.zeros_like(x), estimator="k3") >= 0).all()


@given(seed=SEEDS)
@QUICK
def test_ratio_is_one_where_the_logprobs_are_equal(seed: int):
    batch = Batch(seed)
    logprobs, advantages = batch.tensors["logprobs"], batch.tensors["advantages"]
    terms = F.policy_loss_per_token(
        logprobs, logprobs, advantages, batch.mask, clip_low=0.2, clip_high=0.2
    )
    assert torch.equal(terms.ratio, batch.mask.double())
    assert torch.equal(terms.loss, -advantages.masked_fill(~batch.mask, 0))
    assert not terms.outside.any()
    assert not terms.clip_active.any()
    assert F.approx_kl(logprobs, logprobs, batch.mask).item() == 0.0


@given(seed=SEEDS, num_ranks=st.integers(2, 4))
@QUICK
def test_whitening_over_shards_equals_the_whole(seed: int, num_ranks: int):
    batch = Batch(seed, rows=6)
    x = 1000 + batch.tensors["advantages"]
    whole = F.whiten(x, batch.mask)
    rows = torch.arange(6).tensor_split(num_ranks)
    shards = on_ranks(
        lambda reduce, k: F.whiten(x[rows[k]], batch.mask[rows[k]], reduce=reduce), num_ranks
    )
    assert_close(torch.cat(shards), whole, rtol=1e-9, atol=1e-9)


@given(seed=SEEDS, order=st.permutations(range(8)), num=st.integers(1, 8))
@QUICK
def test_a_random_number_does_not_depend_on_its_batch(seed: int, order: list[int], num: int):
    indices, chosen = torch.arange(8), torch.tensor(order[:num])
    keys = F.combine_keys(seed, 3, indices)
    assert torch.equal(F.combine_keys(seed, 3, indices[chosen]), keys[chosen])
    uniforms = F.hash_uniform(keys, 5)
    assert torch.equal(F.hash_uniform(keys[chosen], 5), uniforms[chosen])
    logits = torch.randn(8, 11, generator=torch.Generator().manual_seed(seed % 2**31))
    ids = F.inverse_cdf_sample(logits, uniforms)
    assert torch.equal(F.inverse_cdf_sample(logits[chosen], uniforms[chosen]), ids[chosen])
