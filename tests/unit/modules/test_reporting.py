"""Totals of an iteration against loops over hand-made responses and steps."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppo_lightning.modules import reporting
from ppo_lightning.modules.collection import Collected
from ppo_lightning.modules.decision import StepReport
from ppo_lightning.modules.objective import SUMS, Terms
from ppo_lightning.modules.reporting import IterationLedger, time_fields
from ppo_lightning.rewards import RewardResult
from ppo_lightning.rollout import Freshness, ShapedRollout, completions_of
from ppo_lightning.types import MiniBatch
from tests.helpers.buffers import experience_of, network_scores, rollout_of
from tests.helpers.scripted import Letters

CPU = torch.device("cpu")
CLOCK = SimpleNamespace(seconds={"update": 2.0}, busy={"update": 0.5}, elapsed=4.0, waited=1.0)
NAN = float("nan")
RESPONSES = [[3, 4, 3, 4, 3], [5, 6], [7, 8, 9], [], [3, 9, 9, 9], [1]]
TRUNCATED = [True, False, True, False, False, True]
DROPPED = [False, False, True, False, False, False]  # and the fourth has no token
KEPT = [0, 1, 4, 5]
SCORES = [1.0, -2.0, 0.0, 9.0, 0.5, 10.0]
RAW = [1.5, -2.0, NAN, 9.0, 0.5, 14.0]
KL_COEF = 0.1


def table(seed, mask, *, positive=False):
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    values = values.abs() if positive else values
    return values.masked_fill(~mask, 0)


def collected():
    """Six responses: one dropped, one without tokens; nan stands where nothing may be read."""
    rollout = rollout_of(RESPONSES, truncated=TRUNCATED)
    mask = rollout.response_mask
    used = mask & ~torch.tensor(DROPPED)[:, None]
    names = ("logprobs", "ref_logprobs", "entropy", "values")
    networks = network_scores(rollout, **{n: table(i, mask) for i, n in enumerate(names)})
    result = RewardResult(
        scores=torch.tensor(SCORES),
        raw=torch.tensor(RAW),
        components={"a": torch.tensor(RAW), "b": torch.tensor([2.0, 4.0, NAN, 8.0, 6.0, 0.0])},
        weights={"a": 1.0, "b": 0.5},
        dropped=torch.tensor(DROPPED),
        clipped=torch.tensor([False, False, False, False, False, True]),
    )
    advantages = table(9, mask).masked_fill(~used, NAN)
    returns = table(8, mask).masked_fill(~used, NAN)
    return Collected(
        rollout=rollout,
        completions=completions_of(rollout, Letters()),
        result=result,
        networks=networks,
        shaped=ShapedRollout(rewards=mask * 0.0, raw_advantages=advantages, mask=used),
        experience=experience_of(rollout.sequences, old_values=networks.values, returns=returns),
        kept=used.any(1),
        nonfinite=torch.tensor([False, False, True, False, False, False]),
        freshness=Freshness.of_current(rollout),
        returning=False,
    )


@pytest.fixture(scope="module")
def stats():
    ledger = IterationLedger(("a", "b"))
    ledger.add_rollout(collected(), KL_COEF)
    return ledger.rollout_stats()


def per_response(values):
    return [values[row] for row in KEPT]


def per_token(values):
    return [float(values[row, t]) for row in KEPT for t in range(len(RESPONSES[row]))]


def row_sums(values):
    return [sum(float(values[row, t]) for t in range(len(RESPONSES[row]))) for row in KEPT]


def test_means_over_responses_leave_out_the_dropped_and_the_empty(stats):
    scores = per_response(SCORES)
    assert stats["score_mean"] == pytest.approx(statistics.fmean(scores))
    assert stats["score_std"] == pytest.approx(statistics.pstdev(scores))
    assert (stats["score_min"], stats["score_max"]) == (min(scores), max(scores))
    assert stats["raw_score_mean"] == pytest.approx(statistics.fmean(per_response(RAW)))
    assert stats["raw_score_std"] == pytest.approx(statistics.pstdev(per_response(RAW)))
    assert stats["score_clipped_share"] == 1 / 4
    assert stats["truncated_share"] == 2 / 4
    lengths = [len(RESPONSES[row]) for row in KEPT]
    assert stats["response_length_mean"] == statistics.fmean(lengths)
    assert stats["response_length_max"] == 5
    assert stats["dropped_responses"] == 2
    assert stats["num_responses"] == 6
    assert stats["policy_version"] == 7
    assert stats["temperature"] == 1.0


def test_kl_per_response_and_per_token_are_two_numbers(stats):
    """T26."""
    networks = collected().networks
    sums = row_sums(networks.logprobs - networks.ref_logprobs)
    assert stats["kl_ref"] == pytest.approx(statistics.fmean(sums))
    assert stats["kl_ref_per_token"] == pytest.approx(sum(sums) / 12)
    rewards = [s - KL_COEF * kl for s, kl in zip(per_response(SCORES), sums, strict=True)]
    assert stats["reward_mean"] == pytest.approx(statistics.fmean(rewards))


def test_means_over_tokens_weigh_every_token_alike(stats):
    """T59, T60."""
    found = collected()
    networks, raw = found.networks, found.shaped.raw_advantages
    assert stats["num_tokens"] == 12
    for name, values in {
        "entropy": networks.entropy,
        "sampled_nll": -networks.logprobs,
        "sampler_mismatch": networks.logprobs.abs(),  # the sampler said 0
        "value_mean": networks.values,
        "return_mean": found.experience.returns,
    }.items():
        assert stats[name] == pytest.approx(statistics.fmean(per_token(values))), name
    assert stats["advantage_std"] == pytest.approx(statistics.pstdev(per_token(raw)))
    assert stats["advantage_abs_max"] == pytest.approx(max(map(abs, per_token(raw))))
    returns, values = per_token(found.experience.returns), per_token(networks.values)
    errors = [g - v for g, v in zip(returns, values, strict=True)]
    explained = 1 - statistics.pvariance(errors) / statistics.pvariance(returns)
    assert stats["explained_variance"] == pytest.approx(explained)


def test_the_samplers_excess_has_a_sign(stats):
    """The sampler said 0: it is surer than the trainer where the trainer's number is below."""
    logprobs = per_token(collected().networks.logprobs)
    assert min(logprobs) < 0 < max(logprobs)
    assert stats["behaviour_kl"] == pytest.approx(-statistics.fmean(logprobs))


def test_places_together_are_the_entropy_of_all(stats):
    counts = {"0": 4, "1": 3, "2-3": 4, "4-7": 1}  # of lengths 5, 2, 4, 1
    total = sum(stats["entropy_at"][name].mean * count for name, count in counts.items())
    assert stats["entropy_at"].keys() == counts.keys()
    assert total / 12 == pytest.approx(stats["entropy"])


def test_score_and_repetition_are_compared_over_the_buffer(stats):
    shares = [2 / 4, 0.0, 1 / 3, 0.0]
    assert stats["score_repetition_correlation"] == pytest.approx(
        statistics.correlation(per_response(RAW), shares)
    )


def test_components_are_means_of_their_own(stats):
    a, b = stats["components"]["a"], stats["components"]["b"]
    assert (a.raw, a.weighted) == (3.5, 3.5)
    assert (b.raw, b.weighted) == (3.0, 1.5)


def test_a_watched_components_missing_scores_are_left_out_of_its_mean():
    found = collected()
    components = dict(found.result.components) | {"b": torch.tensor([NAN, 4.0, 1, 8, 6, 2])}
    ledger = IterationLedger(("a", "b"))
    weights = {"a": 1.0, "b": 0.0}
    result = replace(found.result, components=components, weights=weights)
    ledger.add_rollout(replace(found, result=result), KL_COEF)
    b = ledger.rollout_stats()["components"]["b"]
    assert (b.raw, b.weighted) == (4.0, 0.0)


def test_texts_of_responses_that_count(stats):
    assert stats["distinct_1"] == pytest.approx(6 / 12)
    assert stats["repeated_bigrams"] == pytest.approx((2 / 4 + 0 + 1 / 3 + 0) / 4)
    assert stats["distinct_openings"] == 1.0


def test_a_buffer_whose_responses_are_all_dropped_is_no_error():
    found = collected()
    nothing = torch.zeros_like(found.shaped.mask)
    found = replace(found, kept=nothing.any(1), shaped=replace(found.shaped, mask=nothing))
    ledger = IterationLedger(("a", "b"))
    ledger.add_rollout(found, KL_COEF)
    stats = ledger.rollout_stats()
    assert stats["score_mean"] is None
    assert stats["dropped_responses"] == 6


# The update


class Steps:
    """Feeds a ledger with minibatches of one pass after another."""

    def __init__(self, *, per_pass, passes):
        self.ledger = IterationLedger(())
        self.per_pass, self.passes, self.count = per_pass, passes, 0

    def add(self, decision, *, tokens, kl_old=0.0, norms=(1.0, 2.0), lr=1e-3, part="both", **sums):
        vector = torch.zeros(len(SUMS), dtype=torch.float64)
        counts = dict.fromkeys(("tokens", "value_tokens"), tokens)
        for name, value in {**counts, "kl_old": kl_old * tokens, **sums}.items():
            vector[SUMS.index(name)] = value
        terms = Terms(torch.tensor(0.0), vector, torch.tensor(1.0 + self.count), torch.tensor(0.25))
        report = StepReport(
            decision=decision,
            kl_old=kl_old,
            actor_norm=norms[0],
            critic_norm=norms[1],
            first_error=0.25 if self.count == 0 else None,
        )
        groups = [{"name": "actor", "lr": lr}, {"name": "critic", "lr": 3 * lr}]
        self.ledger.add_step(part, terms, report, groups)
        self.count += 1

    def batch(self, step):
        return MiniBatch(
            experience=collected().experience,
            epoch=step // self.per_pass,
            step=step,
            num_steps=self.per_pass * self.passes,
            num_epochs=self.passes,
        )

    def stats(self, *, num_skipped=0):
        last = self.batch(self.per_pass * self.passes - 1)
        found = self.ledger.stats(last, num_skipped=num_skipped)
        return replace(found, **self.ledger.time_stats(CLOCK, device=CPU))


def test_update_means_are_over_tokens_of_every_minibatch_worked_on():
    """T39, T59: 256, 256 and 10 tokens; the minibatch that stopped the update counts as well."""
    steps = Steps(per_pass=3, passes=2)
    steps.add("step", tokens=256, policy_loss=0.7 * 256, norms=(1.0, 5.0), ratio=256.0)
    steps.add("step", tokens=256, policy_loss=0.8 * 256, norms=(3.0, 1.0), ratio=256.0)
    steps.add("kl_stop", tokens=10, policy_loss=0.9 * 10, norms=(8.0, 0.0), kl_old=0.3, ratio=61.0)
    found = steps.stats(num_skipped=4)
    assert found.policy_loss == pytest.approx(0.75287, abs=1e-5)
    assert found.kl_old == pytest.approx(3.0 / 522)
    assert found.ratio_mean == pytest.approx(573 / 522)
    assert found.ratio_max == 3.0
    assert (found.grad_norm_actor, found.grad_norm_actor_max) == (4.0, 8.0)
    assert (found.grad_norm_critic, found.grad_norm_critic_max) == (2.0, 5.0)
    assert (found.kl_old_last, found.kl_stopped) == (0.3, 1.0)
    assert (found.steps_taken, found.steps_skipped_kl, found.steps_skipped_nonfinite) == (2, 4, 0)
    assert found.epochs_done == pytest.approx(2 / 3)
    assert found.first_ratio_error == 0.25
    assert (found.lr_actor, found.lr_critic) == (1e-3, 3e-3)
    assert found.update_tokens_per_second == 522 / 2.0


def test_shares_by_the_advantages_sign_are_of_tokens_of_that_sign():
    steps = Steps(per_pass=2, passes=1)
    counts = {"positive": 30, "outside_positive": 3, "negative": 50, "outside_negative": 20}
    steps.add("step", tokens=100, outside=23, ratio_beyond_2=5, **counts)
    steps.add("step", tokens=300, outside=3, ratio_beyond_2=1, positive=20, outside_positive=3)
    found = steps.stats()
    assert found.clip_fraction == 26 / 400
    assert (found.clip_fraction_positive, found.clip_fraction_negative) == (6 / 50, 20 / 50)
    assert found.ratio_beyond_2 == 6 / 400


def test_where_no_advantage_has_a_sign_there_is_no_share_of_it():
    steps = Steps(per_pass=1, passes=1)
    steps.add("step", tokens=100, outside=23)
    found = steps.stats()
    assert found.clip_fraction_positive is found.clip_fraction_negative is None


def test_steps_that_were_not_finite_are_counted_and_in_no_mean():
    steps = Steps(per_pass=2, passes=1)
    steps.add("nonfinite", tokens=100, policy_loss=NAN, norms=(math.inf, NAN), kl_old=NAN)
    steps.add("step", tokens=50, policy_loss=25.0)
    found = steps.stats()
    assert found.policy_loss == 0.5
    assert (found.grad_norm_actor, found.grad_norm_critic_max) == (1.0, 2.0)
    assert (found.steps_taken, found.steps_skipped_nonfinite) == (1, 1)
    assert found.steps_skipped_kl == 0


def test_steps_of_the_actor_are_those_that_moved_it():
    """Critic-only passes, and forwards without a step, move it not at all."""
    steps = Steps(per_pass=6, passes=1)
    for decision, part in [
        ("step", "both"),
        ("step", "critic"),
        ("step", "actor"),
        ("nonfinite", "actor"),
        ("step", "critic"),
        ("kl_stop", "actor"),
    ]:
        steps.add(decision, tokens=10, part=part)
    assert steps.stats().actor_steps == 2
    assert steps.stats().steps_taken == 4


def test_each_iteration_starts_from_nothing():
    steps = Steps(per_pass=1, passes=1)
    steps.add("kl_stop", tokens=10, kl_old=0.5)
    steps.ledger.reset(CPU)
    steps.count = 0
    steps.add("step", tokens=10, policy_loss=10.0)
    found = steps.stats()
    assert (found.kl_stopped, found.kl_old, found.policy_loss) == (0.0, 0.0, 1.0)


def test_device_idle_share_is_what_no_stage_but_the_reward_explains():
    seconds = {"rollout": 4.0, "reward": 3.0, "scoring": 1.0, "update": 3.0}
    found = time_fields(seconds, total=16.0, rollout_tokens=80.0, update_tokens=60.0)
    assert found["device_idle_share"] == 0.5
    assert found["rollout_tokens_per_second"] == 20.0
    assert found["update_tokens_per_second"] == 20.0
    assert "validation_seconds" not in found


def test_each_stage_has_its_idle_share_where_the_device_tells():
    ledger = IterationLedger(())
    found = ledger.time_stats(CLOCK, device=CPU)
    assert found["update_idle_share"] == 0.75
    assert "rollout_idle_share" not in found  # there was none
    assert "waiting_share" not in found  # nobody to wait for
    silent = SimpleNamespace(**vars(CLOCK) | {"busy": {}})
    assert "update_idle_share" not in ledger.time_stats(silent, device=CPU)


def test_the_time_spent_waiting_is_a_share_of_the_iteration(monkeypatch):
    monkeypatch.setattr(reporting, "world_size", lambda: 2)
    assert IterationLedger(()).time_stats(CLOCK, device=CPU)["waiting_share"] == 0.25
