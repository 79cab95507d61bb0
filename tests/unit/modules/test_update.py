"""Gradients and the decision of one optimiser step, with ranks played by turns."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import ppo_lightning.modules.decision as decision_file
import ppo_lightning.modules.update as update
from ppo_lightning.configs import CriticConfig, KLConfig, PolicyConfig, PPOConfig
from ppo_lightning.models import build_actor_critic
from ppo_lightning.modules.decision import Limits, report_of
from ppo_lightning.modules.objective import SUMS, Coefficients, Terms
from ppo_lightning.modules.update import (
    Objective,
    accumulate_gradients,
    microbatches,
)
from tests.helpers.buffers import experience_of
from tests.helpers.sequences import sequences_of

NAN, INF = float("nan"), float("inf")
PROMPTS = [[5, 9, 11], [12, 7, 30, 8, 21], [6], [14, 9]]
RESPONSES = [[20, 13, 17, 2], [9, 22], [7, 7, 8, 31, 4, 2], [3]]


def terms(*, kl_sum=0.0, tokens=4.0, loss=1.0, **others):
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    for name, value in {"kl_old": kl_sum, "tokens": tokens, **others}.items():
        sums[SUMS.index(name)] = value
    return Terms(torch.tensor(loss), sums, torch.tensor(1.0), torch.tensor(0.0))


def report(found, *, actor=1.0, critic=2.0, limit=0.02, **limits):
    limits = Limits(kl_old=limit, **limits)
    return report_of(found, torch.tensor(actor), torch.tensor(critic), limits=limits)


@pytest.mark.parametrize(
    ("kl_sum", "limit", "decision"),
    [
        (0.06, 0.02, "step"),
        (0.0625, 0.015625, "step"),  # at the limit, exactly
        (0.1, 0.02, "kl_stop"),
        (50.0, INF, "step"),
    ],
)
def test_the_update_stops_above_the_limit(kl_sum, limit, decision):
    found = report(terms(kl_sum=kl_sum), limit=limit)
    assert found.decision == decision
    assert found.kl_old == pytest.approx(kl_sum / 4)
    assert (found.actor_norm, found.critic_norm) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("faulty", "norms"),
    [
        ({"loss": NAN}, {}),
        ({"loss": INF}, {}),
        ({"value_loss": NAN}, {}),
        ({"kl_sum": NAN}, {}),
        ({}, {"actor": NAN}),
        ({}, {"critic": INF}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kl_sum", [0.0, 9.0])
def test_numbers_that_are_not_finite_come_before_the_kl(faulty, norms, kl_sum):
    """T41: also where the KL would have stopped the update, since it means nothing then."""
    assert report(terms(**{"kl_sum": kl_sum, **faulty}), **norms).decision == "nonfinite"


def test_no_token_on_any_rank_is_no_division_by_zero():
    found = report(terms(tokens=0.0))
    assert (found.decision, found.kl_old) == ("empty", 0.0)


def test_t42_the_decision_is_made_on_the_sum_over_ranks(monkeypatch):
    others = torch.tensor([0.5, 0.0, 0.0, 4.0, 0.0, 4.0], dtype=torch.float64)
    bad = torch.tensor(0.0, dtype=torch.float64)
    monkeypatch.setattr(decision_file, "all_reduce_sum", lambda own: own + others)
    monkeypatch.setattr(decision_file, "sum_over_ranks", lambda own: own + bad)
    found = report(terms(kl_sum=0.0))
    assert (found.decision, found.kl_old) == ("kl_stop", 0.5 / 8)
    bad += 1.0  # another rank's loss is not finite
    assert report(terms(kl_sum=0.0)).decision == "nonfinite"


@pytest.mark.parametrize(
    ("before", "now", "limits", "decision"),
    [
        (2.0, 11.9, {"kl_ref": 6.0}, "step"),  # 2 responses: 5.95 nats each
        (2.0, 12.1, {"kl_ref": 6.0}, "kl_cap"),
        (2.0, 0.41, {"kl_ref_per_token": 0.1}, "step"),  # less than before
        (0.2, 0.41, {"kl_ref_per_token": 0.1}, "kl_cap"),  # 4 tokens
        (90.0, 89.0, {"kl_ref": 6.0, "kl_ref_per_token": 0.1}, "step"),  # on its way back
        (89.0, 90.0, {}, "step"),
    ],
)
def test_the_update_stops_where_it_takes_the_policy_beyond_the_cap(before, now, limits, decision):
    found = terms(sequences=2.0, kl_ref=now, kl_ref_before=before)
    assert report(found, **limits).decision == decision


# Forward and backward of a tiny model


@pytest.fixture(scope="module")
def networks(tiny_llama_dir):
    policy = PolicyConfig(path=str(tiny_llama_dir), dtype="float64")
    return build_actor_critic(policy, CriticConfig(kind="shared", head_init="normal"))


def minibatch():
    sequences = sequences_of(PROMPTS, RESPONSES)
    generator = torch.Generator().manual_seed(0)
    names = ("old_logprobs", "old_values", "ref_logprobs", "advantages", "returns")
    shape = sequences.response_ids.shape
    columns = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n in names}
    return experience_of(sequences, temperature=0.9, **columns)


def objective_of(networks, *, aggregation="token", max_tokens=None):
    return Objective(
        networks=networks,
        reference=None,
        ppo=PPOConfig(loss_aggregation=aggregation, microbatch_tokens=max_tokens),
        kl=KLConfig(),
    )


def gradients(networks, batch, *, aggregation="token", max_tokens=None):
    objective = objective_of(networks, aggregation=aggregation, max_tokens=max_tokens)
    coefficients = Coefficients(
        clip_low=0.2, clip_high=0.2, ent_coef=0.01, kl_coef=0.0, penalty_coef=1.0
    )
    networks.zero_grad()
    found = accumulate_gradients(batch, objective, coefficients, backward=torch.Tensor.backward)
    return found, {name: p.grad.clone() for name, p in networks.named_parameters()}


def assert_same(found, expected):
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_t38_t39_a_rank_short_of_rows_runs_dummies_that_change_nothing(networks, monkeypatch):
    expected_terms, expected = gradients(networks, minibatch())
    monkeypatch.setattr(update, "max_over_ranks", lambda number, device: number + 2)
    pieces = microbatches(minibatch(), objective_of(networks))
    assert [bool(p.sequences.response_mask.any()) for p in pieces] == [True, False, False]
    found_terms, found = gradients(networks, minibatch())
    assert_same(found, expected)
    assert torch.equal(found_terms.sums, expected_terms.sums)
    assert torch.equal(found_terms.loss, expected_terms.loss)


def test_a_rank_without_rows_has_gradients_of_zero(networks, monkeypatch):
    """Not None: a strategy averages what every rank has."""
    monkeypatch.setattr(update, "max_over_ranks", lambda number, device: max(number, 1))
    found, grads = gradients(networks, minibatch().select(torch.arange(0)))
    assert found.loss == 0
    assert not found.sums.any()
    assert all(not g.any() for g in grads.values())


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_t39_averaged_gradients_of_two_ranks_are_those_of_one(networks, monkeypatch, aggregation):
    """Each rank has its own rows; the strategy averages; counts are of both."""
    whole = minibatch()
    _, expected = gradients(networks, whole, aggregation=aggregation)
    mask = whole.sequences.response_mask
    counts = torch.tensor([mask.sum(), mask.any(1).sum()]).double()
    monkeypatch.setattr(update, "all_reduce_sum", lambda own: counts)
    monkeypatch.setattr(update, "num_replicas", lambda: 2)
    parts = [
        gradients(networks, whole.select(rows), aggregation=aggregation)[1]
        for rows in (torch.tensor([0]), torch.tensor([3, 1, 2]))
    ]
    averaged = {name: (parts[0][name] + parts[1][name]) / 2 for name in expected}
    assert_same(averaged, expected)


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_networks_that_share_nothing_go_backward_in_turn(tiny_llama_dir, monkeypatch, kind):
    """With the gradients and sums of one backward pass; several ranks have one in any case."""
    policy = PolicyConfig(path=str(tiny_llama_dir), dtype="float64")
    networks = build_actor_critic(policy, CriticConfig(kind=kind, head_init="normal"))
    coefficients = Coefficients(
        clip_low=0.2, clip_high=0.2, ent_coef=0.01, kl_coef=0.0, penalty_coef=1.0
    )

    def measured(backward):
        objective = objective_of(networks)
        objective = replace(objective, ppo=replace(objective.ppo, backward=backward))
        reached = []
        networks.zero_grad()

        def go(loss):
            loss.backward()
            reached.append(sum(p.grad is not None for p in networks.parameters()))

        terms = accumulate_gradients(minibatch(), objective, coefficients, backward=go)
        return reached, terms, {n: p.grad.clone() for n, p in networks.named_parameters()}

    reached, found, gradients_found = measured("in_turn")
    _, expected, gradients_expected = measured("together")
    assert_same(gradients_found, gradients_expected)
    assert_close(found.sums, expected.sums)
    assert_close(found.loss, expected.loss)
    actor, everything = len(list(networks.actor_parameters())), len(gradients_expected)
    assert reached == ([actor, everything] if kind == "separate" else [everything])
    monkeypatch.setattr(update, "shares_gradients", lambda parameters: True)
    assert measured("in_turn")[0] == [everything]


def test_an_entropy_that_is_only_logged_costs_no_gradient(networks, monkeypatch):
    seen = []
    forward = type(networks).forward
    monkeypatch.setattr(
        type(networks), "forward", lambda *args, **kw: seen.append(kw) or forward(*args, **kw)
    )
    objective = Objective(networks=networks, reference=None, ppo=PPOConfig(), kl=KLConfig())
    plain = Coefficients(clip_low=0.2, clip_high=0.2, ent_coef=0.0, kl_coef=0.0, penalty_coef=1.0)
    for coefficients in (plain, replace(plain, ent_coef=0.01)):
        accumulate_gradients(minibatch(), objective, coefficients, backward=torch.Tensor.backward)
    assert [kw["entropy_grad"] for kw in seen] == [False, True]
