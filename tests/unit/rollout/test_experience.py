"""From sampled responses to the buffer, by hand-made numbers."""

from dataclasses import fields, replace

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import CriticConfig, KLConfig, PolicyConfig, PPOConfig, ReferenceConfig
from ppo_lightning.models import ReferencePolicy, build_actor_critic
from ppo_lightning.rollout import NetworkScores, build_experience, score_with_networks
from tests.helpers.buffers import network_scores, rollout_of
from tests.helpers.sequences import sequences_of
from tests.helpers.tiny_models import build_gpt2
from tests.helpers.virtual_ranks import on_ranks

NAN = float("nan")
THREE = [[4, 5, 6], [7, 8, 9]]
RAW = PPOConfig(whiten_advantages=False)


def build(rollout, scores, networks, *, used=None, ppo=RAW, **options):
    """Shape with the settings of a test, everything used, one rank."""
    settings = {
        "kl": KLConfig(),
        "kl_coef": 0.0,
        "reduce": lambda x: x,
        "num_responses": len(scores),
        "iteration": 3,
    } | options
    used = torch.ones(len(scores), dtype=torch.bool) if used is None else torch.tensor(used)
    return build_experience(rollout, torch.tensor(scores), networks, used=used, ppo=ppo, **settings)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("token", [[-0.1, -0.2, 0.7], [-0.4, 1.5, 0.0]]),
        ("last", [[0.0, 0.0, 0.4], [0.0, 1.1, 0.0]]),
        ("loss", [[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]]),
    ],
)
def test_t22_t28_rewards_stand_where_they_belong(placement, expected):
    """The score at the last valid token, −β·KL at its own token, nothing at padding."""
    rollout = rollout_of([[4, 5, 6], [7, 8]])
    kl = torch.tensor([[0.2, 0.4, 0.6], [0.8, 1.0, 99.0]])
    options = {"kl": KLConfig(estimator="k2", placement=placement), "kl_coef": 0.5}
    networks = network_scores(rollout, kl=kl)
    ppo = replace(RAW, gae_lambda=1.0)
    experience, shaped = build(rollout, [1.0, 2.0], networks, ppo=ppo, **options)
    assert_close(shaped.rewards, torch.tensor(expected))
    assert torch.equal(shaped.mask, rollout.response_mask)
    # γ = λ = 1 and values of 0: the returns are sums of what is still to come.
    assert_close(experience.returns, torch.tensor(expected).flip(1).cumsum(1).flip(1))


def test_t22_advantages_and_returns_by_hand():
    rollout = rollout_of([[4, 5, 6], [7, 8, 9, 2]])
    values = torch.full((2, 4), 0.5)
    experience, _ = build(rollout, [1.0, 1.0], network_scores(rollout, values=values))
    assert_close(experience.advantages[0], torch.tensor([0.45125, 0.475, 0.5, 0.0]))
    assert_close(experience.returns[0], torch.tensor([0.95125, 0.975, 1.0, 0.0]))


@pytest.mark.parametrize("bootstrap", [False, True])
def test_t34_values_after_the_cut_count_where_the_config_says_and_a_response_was_cut(bootstrap):
    rollout = rollout_of(THREE, truncated=[True, False])
    networks = network_scores(
        rollout, values=torch.full((2, 3), 0.5), final_values=torch.tensor([0.8, 0.8])
    )
    ppo = replace(RAW, bootstrap_truncated=bootstrap)
    advantages = build(rollout, [1.0, 1.0], networks, ppo=ppo)[0].advantages
    ended = torch.tensor([0.45125, 0.475, 0.5])
    assert_close(advantages[0], torch.tensor([1.17325, 1.235, 1.3]) if bootstrap else ended)
    assert_close(advantages[1], ended)


def random_scores(rollout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = rollout.response_ids.shape
    names = ("logprobs", "ref_logprobs", "values")
    return network_scores(rollout, **{n: torch.randn(shape, generator=generator) for n in names})


def test_the_critic_may_have_a_lambda_of_its_own():
    rollout = rollout_of(THREE)
    networks = random_scores(rollout)
    both, actor, critic = (
        build(rollout, [1.0, -1.0], networks, ppo=replace(RAW, **settings))[0]
        for settings in (
            {"gae_lambda": 0.5, "value_gae_lambda": 1.0},
            {"gae_lambda": 0.5},
            {"gae_lambda": 1.0},
        )
    )
    assert torch.equal(both.advantages, actor.advantages)
    assert torch.equal(both.returns, critic.returns)
    assert not torch.equal(actor.returns, critic.returns)


def test_whitening_is_over_the_whole_buffer_and_leaves_the_returns_alone():
    rollout = rollout_of([[4, 5, 6, 7], [8], [9, 3]])
    networks = random_scores(rollout)
    scores = [1.0, -5.0, 3.0]
    raw, shaped = build(rollout, scores, networks)
    white, _ = build(rollout, scores, networks, ppo=PPOConfig())
    mask = rollout.response_mask
    assert_close(white.advantages[mask].mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    assert_close(white.advantages[mask].std(correction=0), torch.tensor(1.0))
    assert not white.advantages[~mask].any()
    assert torch.equal(white.returns, raw.returns)
    assert torch.equal(shaped.raw_advantages, raw.advantages)
    assert_close(white.returns[mask], (raw.advantages + networks.values)[mask])


def test_t32_whitening_has_one_mean_over_the_ranks():
    rollout = rollout_of([[4, 5, 6], [8], [9, 3], [5]])
    networks, scores = random_scores(rollout), [1.0, -5.0, 3.0, 0.5]
    whole, _ = build(rollout, scores, networks, ppo=PPOConfig())

    def shard(reduce, rank):
        rows = torch.arange(rank, 4, 2)
        part = NetworkScores(**{f.name: getattr(networks, f.name)[rows] for f in fields(networks)})
        own = [scores[row] for row in rows.tolist()]
        found, _ = build(rollout.select(rows), own, part, ppo=PPOConfig(), reduce=reduce)
        return found.advantages

    first, second = on_ranks(shard, 2)
    assert_close(torch.stack([first, second], 1).flatten(0, 1), whole.advantages)


def test_responses_that_are_not_used_take_part_in_nothing():
    """Dropped, or masked for being cut: nan in them changes no number of the others."""
    rollout = rollout_of([[4, 5, 6], [8, 2], [9, 3, 7]], truncated=[False, True, False])
    networks = random_scores(rollout)
    ppo = PPOConfig(bootstrap_truncated=True)
    without = rollout.select(torch.tensor([0, 2]))
    rows = {f.name: getattr(networks, f.name)[[0, 2]] for f in fields(networks)}
    expected, _ = build(without, [1.0, -1.0], NetworkScores(**rows), ppo=ppo, kl_coef=0.1)
    for column in (networks.values, networks.kl, networks.final_values):
        column[1] = NAN
    found, shaped = build(
        rollout, [1.0, NAN, -1.0], networks, used=[True, False, True], ppo=ppo, kl_coef=0.1
    )
    assert not found.sequences.response_mask[1].any()
    assert not shaped.mask[1].any()
    for name in ("advantages", "returns"):
        assert_close(getattr(found, name)[[0, 2]], getattr(expected, name))
        assert not getattr(found, name)[1].any()
    assert not shaped.rewards[1].any()


def test_t33_one_response_of_one_token_is_finite():
    rollout = rollout_of([[4]])
    found, _ = build(rollout, [3.0], network_scores(rollout), ppo=PPOConfig())
    assert found.advantages.tolist() == [[0.0]]
    assert found.returns.tolist() == [[3.0]]


def test_the_buffer_says_where_it_comes_from():
    rollout = rollout_of(THREE)
    networks = random_scores(rollout)
    found, _ = build(rollout, [1.0, 2.0], networks, num_responses=9)
    assert (found.num_responses, found.iteration, found.policy_version) == (9, 3, 7)
    assert found.indices.tolist() == [0, 1]
    assert torch.equal(found.old_logprobs, networks.logprobs)
    assert torch.equal(found.old_values, networks.values)
    assert torch.equal(found.sequences.response_ids, rollout.response_ids)


# What the networks say


@pytest.fixture(scope="module")
def network(tiny_llama_dir, tmp_path_factory):
    """Actor and critic, and a reference that differs from the actor."""
    policy = PolicyConfig(path=str(tiny_llama_dir), dtype="float64")
    networks = build_actor_critic(policy, CriticConfig(head_init="normal"))
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    with torch.no_grad():
        for parameter in networks.actor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return networks, reference


BATCH = sequences_of(
    [[5, 9, 11], [12, 7, 30, 8, 21], [6], [14, 9]], [[20, 13, 17, 2], [9, 22], [7, 7, 8], [3]]
)


def scored(network, *, estimator="k1", max_tokens=None):
    networks, reference = network
    return score_with_networks(
        BATCH,
        networks=networks,
        reference=reference,
        temperature=0.7,
        estimator=estimator,
        max_tokens=max_tokens,
    )


@pytest.mark.parametrize("max_tokens", [1, 12, 20])
def test_t40_the_cut_into_microbatches_changes_nothing(network, max_tokens):
    whole, cut = scored(network), scored(network, max_tokens=max_tokens)
    for field in fields(whole):
        found, expected = getattr(cut, field.name), getattr(whole, field.name)
        assert_close(found, expected, rtol=0, atol=1e-12, msg=field.name)


def test_t27_each_estimator_is_that_of_the_log_ratio_and_full_is_exact(network):
    networks, reference = network
    found = {name: scored(network, estimator=name) for name in ("k1", "k2", "k3", "abs", "full")}
    mask = BATCH.response_mask
    x = (found["k1"].logprobs - found["k1"].ref_logprobs)[mask]
    for name, wanted in {
        "k1": x,
        "k2": x**2 / 2,
        "k3": (-x).exp() - 1 + x,
        "abs": x.abs(),
    }.items():
        assert_close(found[name].kl[mask], wanted)
    with torch.no_grad():
        ours = networks(BATCH, temperature=0.7, logits=True).logits[mask]
    theirs = reference.logprobs(BATCH, temperature=0.7, logits=True).logits[mask]
    p, q = (ours / 0.7).softmax(-1), (theirs / 0.7).softmax(-1)
    assert_close(found["full"].kl[mask], (p * (p / q).log()).sum(-1))
    assert (x < 0).any()  # a single k1 may be negative
    assert (found["full"].kl[mask] > 0).all()
    assert all(not scores.kl[~mask].any() for scores in found.values())


def test_final_values_are_of_the_state_after_the_last_token(tmp_path):
    policy = PolicyConfig(path=str(build_gpt2(tmp_path / "m")), dtype="float64")
    networks = build_actor_critic(policy, CriticConfig(head_init="normal"))
    reference = ReferencePolicy.build(ReferenceConfig(), policy, networks.actor)
    longer = sequences_of([[5, 9]], [[20, 13, 2, 7]])
    shorter = sequences_of([[5, 9]], [[20, 13, 2]])
    options = {
        "networks": networks,
        "reference": reference,
        "temperature": 1.0,
        "estimator": "k1",
        "max_tokens": None,
    }
    final = score_with_networks(shorter, **options).final_values
    assert_close(final, score_with_networks(longer, **options).values[:, 3])
    assert score_with_networks(shorter, **options, final_values=False).final_values is None
