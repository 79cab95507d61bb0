"""What must hold of networks and losses together, whatever is sampled: both families of models."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from ppo_lightning.configs import (
    CriticConfig,
    KLConfig,
    PolicyConfig,
    PPOConfig,
    ReferenceConfig,
)
from ppo_lightning.models import ActorCritic, ReferencePolicy, build_actor_critic
from ppo_lightning.modules.objective import SUMS, Coefficients, Terms
from ppo_lightning.modules.update import Objective, accumulate_gradients
from ppo_lightning.rollout import NetworkScores, build_experience, score_with_networks
from ppo_lightning.types import Experience, Rollout, Sequences
from tests.helpers.buffers import rollout_of

QUICK = settings(max_examples=8)
SEEDS = st.integers(0, 2**31 - 1)
COEFFICIENTS = Coefficients(
    clip_low=0.2, clip_high=0.2, ent_coef=0.01, kl_coef=0.05, penalty_coef=1.0
)
TEMPERATURE = 0.8
VOCABULARY = 50  # ids that both families know


class Setup(NamedTuple):
    """A policy that has moved away from its reference."""

    networks: ActorCritic
    reference: ReferencePolicy


def build(folder: Path, kind: str) -> Setup:
    policy = PolicyConfig(path=str(folder), dtype="float64")
    networks = build_actor_critic(policy, CriticConfig(kind=kind, head_init="normal"))
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in networks.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(0.02 * noise)
    return Setup(networks, reference)


@pytest.fixture(scope="module", params=["gpt2-separate", "gpt2-shared", "llama-separate"])
def setup(request: pytest.FixtureRequest) -> Setup:
    family, kind = request.param.split("-")
    return build(request.getfixturevalue(f"tiny_{family}_dir"), kind)


def sampled(seed: int, *, padding: int = 0) -> Rollout:
    """Prompts and responses of random lengths and ids."""
    generator = torch.Generator().manual_seed(seed)

    def rows(low: int, high: int) -> list[list[int]]:
        lengths = torch.randint(low, high + 1, (5,), generator=generator).tolist()
        return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]

    found = rollout_of(rows(1, 5), prompts=rows(1, 6), padding=padding)
    return replace(found, temperature=TEMPERATURE)


def padded_with(rollout: Rollout, seed: int) -> Rollout:
    """The same, with random valid ids under the padding of prompts and responses."""
    generator = torch.Generator().manual_seed(seed)

    def filled(ids: Tensor, mask: Tensor) -> Tensor:
        junk = torch.randint(0, VOCABULARY, ids.shape, generator=generator)
        return torch.where(mask, ids, junk)

    prompts = rollout.prompts
    return replace(
        rollout,
        prompts=replace(prompts, prompt_ids=filled(prompts.prompt_ids, prompts.prompt_mask)),
        response_ids=filled(rollout.response_ids, rollout.response_mask),
    )


def scores_of(setup: Setup, sequences: Sequences, max_tokens: int | None = None) -> NetworkScores:
    return score_with_networks(
        sequences,
        networks=setup.networks,
        reference=setup.reference,
        temperature=TEMPERATURE,
        estimator="full",
        max_tokens=max_tokens,
    )


def buffer_of(setup: Setup, rollout: Rollout, max_tokens: int | None = None) -> Experience:
    """Score and shape with scores that are the sampled ids' sums."""
    count = len(rollout.response_ids)
    return build_experience(
        rollout,
        rollout.response_ids.masked_fill(~rollout.response_mask, 0).sum(1).double() / 50,
        scores_of(setup, rollout.sequences, max_tokens),
        used=torch.ones(count, dtype=torch.bool),
        ppo=PPOConfig(),
        kl=KLConfig(estimator="full"),
        kl_coef=0.05,
        reduce=lambda x: x,
        num_responses=count,
        iteration=0,
    )[0]


def update(setup: Setup, buffer: Experience, **ppo: Any) -> tuple[Terms, list[Tensor]]:
    """Forward and backward over a minibatch: terms and gradients."""
    objective = Objective(
        networks=setup.networks,
        reference=setup.reference,
        ppo=PPOConfig(**ppo),
        kl=KLConfig(estimator="full", placement="loss"),
    )
    setup.networks.zero_grad()
    terms = accumulate_gradients(buffer, objective, COEFFICIENTS, backward=torch.Tensor.backward)
    return terms, [p.grad.clone() for p in setup.networks.parameters() if p.grad is not None]


def moved(buffer: Experience, seed: int) -> Experience:
    """As if the policy had moved since: ratios around 1, values off their old ones."""
    generator = torch.Generator().manual_seed(seed)

    def shaken(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x + (0.3 * noise).masked_fill(~buffer.sequences.response_mask, 0)

    return replace(
        buffer, old_logprobs=shaken(buffer.old_logprobs), old_values=shaken(buffer.old_values)
    )


@given(seed=SEEDS, junk=SEEDS)
@QUICK
def test_what_stands_at_padding_changes_no_number_and_no_gradient(
    setup: Setup, seed: int, junk: int
):
    """T09, T15, T35: bitwise, from the forward passes of the rollout to the gradients."""
    plain = sampled(seed)
    dirty = padded_with(plain, junk)
    buffers = [buffer_of(setup, rollout) for rollout in (plain, dirty)]
    for field in fields(Experience):
        one, other = (getattr(buffer, field.name) for buffer in buffers)
        if isinstance(one, Tensor):
            assert torch.equal(one, other), field.name
    (terms, gradients), (other_terms, other_gradients) = (
        update(setup, moved(buffer, seed)) for buffer in buffers
    )
    assert torch.equal(terms.loss, other_terms.loss)
    assert torch.equal(terms.sums, other_terms.sums)
    assert gradients
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@given(seed=SEEDS, budget=st.sampled_from([1, 9, 16, 30]))
@QUICK
def test_the_gradient_does_not_depend_on_the_microbatches(
    setup: Setup, aggregation: str, seed: int, budget: int
):
    """T38, T39: also where the pieces are of unequal size and padding."""
    buffer = moved(buffer_of(setup, sampled(seed)), seed)
    terms, gradients = update(setup, buffer, loss_aggregation=aggregation)
    cut_terms, cut = update(setup, buffer, loss_aggregation=aggregation, microbatch_tokens=budget)
    assert_close(cut_terms.loss, terms.loss, rtol=1e-10, atol=1e-12)
    assert_close(cut_terms.sums, terms.sums, rtol=1e-9, atol=1e-10)
    for a, b in zip(cut, gradients, strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-10)


@given(seed=SEEDS, budgets=st.tuples(*[st.sampled_from([None, 9, 25])] * 2))
@QUICK
def test_the_ratio_is_one_before_the_first_update(
    setup: Setup, seed: int, budgets: tuple[int | None, int | None]
):
    """T11, T17: the rollout's pass and the update's, each cut in its own way."""
    scoring, updating = budgets
    buffer = buffer_of(setup, sampled(seed), scoring)
    terms, _ = update(setup, buffer, microbatch_tokens=updating)
    sums = dict(zip(SUMS, terms.sums.tolist(), strict=True))
    assert terms.first_error < 1e-11
    assert sums["ratio"] == pytest.approx(sums["tokens"], abs=1e-9)
    assert sums["kl_old"] == pytest.approx(0, abs=1e-12)
    assert sums["outside"] == sums["clip_active"] == sums["value_clipped"] == 0


@given(seed=SEEDS)
@QUICK
def test_a_response_is_scored_alike_in_any_company(setup: Setup, seed: int):
    """T09, T17: alone, without padding, or beside longer ones."""
    rollout = sampled(seed)
    together = scores_of(setup, rollout.sequences)
    for row in range(len(rollout.response_ids)):
        rows = torch.tensor([row])
        alone = scores_of(setup, rollout.sequences.select(rows).trimmed())
        width = int(rollout.response_mask[row].sum())
        for field in fields(NetworkScores):
            whole, own = getattr(together, field.name)[row], getattr(alone, field.name)[0]
            whole = whole[:width] if whole.dim() else whole
            assert_close(own, whole, rtol=0, atol=1e-11, msg=field.name)
