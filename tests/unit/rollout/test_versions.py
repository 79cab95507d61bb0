"""Lags, and what is decided about responses of older weights."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.errors import RolloutError
from ppo_lightning.rollout import PolicyVersions, judged
from tests.helpers.buffers import rollout_of

RESPONSES = [[3, 4, 5], [6], [7, 8], [9, 9]]


def versions_of(*known):
    versions = PolicyVersions()
    for version in known:
        versions.note(version)
    return versions


def rollout(*sampled_by):
    return replace(rollout_of(RESPONSES), versions=torch.tensor(sampled_by))


def fresh(prompts):
    """Answers of the current version, longer than those before."""
    answers = rollout_of([[2, 2, 2, 2]] * len(prompts))
    return replace(answers, prompts=prompts, policy_version=24)


def decide(config, found, sample=fresh, *, versions=(0, 8, 16, 24), any_rank=bool):
    return judged(found, versions_of(*versions), config, sample=sample, any_rank=any_rank)


def refuse(prompts):
    raise AssertionError("nothing was to be sampled again")


def test_the_lag_counts_updates_that_took_steps_whatever_their_number():
    versions = versions_of(0, 8, 8, 11, 30)  # the third update took no step
    assert versions.lags(torch.tensor([30, 11, 8, 0, 9])).tolist() == [0, 1, 2, 3, 2]
    assert PolicyVersions().lags(torch.tensor([5])).tolist() == [0]


def test_versions_survive_a_checkpoint_and_do_not_grow_without_end():
    versions = versions_of(*range(0, 4000, 4))
    assert len(versions.state_dict()["known"]) == 256
    resumed = PolicyVersions()
    resumed.load_state_dict(versions.state_dict())
    asked = torch.tensor([3996, 3992, 0])
    assert resumed.lags(asked).tolist() == versions.lags(asked).tolist() == [0, 1, 256]
    resumed.load_state_dict({})  # of a run before there were any
    assert resumed.lags(asked).tolist() == [0, 0, 0]


def test_current_responses_are_left_alone():
    found = rollout_of(RESPONSES)
    for rule in ("drop", "resample", "correct", "use"):
        for strict in (False, True):
            config = StalenessConfig(on_stale=rule, strict=strict)
            kept, freshness = decide(config, found, refuse, versions=(7,))
            assert kept is found
            assert not (freshness.dropped | freshness.resampled | freshness.corrected).any()
            assert freshness.weighed(found.sampler_logprobs, found, cap=2.0).weights is None


def test_drop_leaves_out_what_is_beyond_the_limit():
    _, freshness = decide(
        StalenessConfig(on_stale="drop", max_lag=1), rollout(24, 16, 8, 0), refuse
    )
    assert freshness.lags.tolist() == [0, 1, 2, 3]
    assert freshness.dropped.tolist() == [False, False, True, True]
    assert not freshness.corrected.any()


def test_resample_replaces_stale_rows_alone():
    found = rollout(24, 8, 24, 0)
    kept, freshness = decide(StalenessConfig(on_stale="resample"), found)
    assert freshness.resampled.tolist() == [False, True, False, True]
    assert freshness.lags.tolist() == [0, 0, 0, 0]
    assert kept.sampled_by.tolist() == [24] * 4
    lengths = kept.response_mask.sum(1)
    assert lengths.tolist() == [3, 4, 2, 4]
    assert kept.response_ids[0, :3].tolist() == [3, 4, 5]
    assert kept.response_ids[1].tolist() == kept.response_ids[3].tolist() == [2, 2, 2, 2]
    assert kept.prompts is found.prompts


def test_ranks_sample_again_together():
    asked = []

    def note(prompts):
        asked.append(len(prompts))
        none = rollout_of([[2, 2, 2, 2]]).select(torch.arange(0))
        return replace(none, prompts=prompts, policy_version=24)

    config = StalenessConfig(on_stale="resample")
    answers = iter([True, False])  # another rank has stale ones; and none when they were replaced
    kept, _ = decide(config, rollout(24, 24, 24, 24), note, any_rank=lambda flag: next(answers))
    assert asked == [0]
    assert kept.response_mask.sum(1).tolist() == [3, 1, 2, 2]


def test_an_engine_that_stays_stale_is_an_error():
    def late(prompts):
        return replace(fresh(prompts), policy_version=0)

    with pytest.raises(
        RolloutError, match=r"2 responses on this rank are still more than `max_lag"
    ):
        decide(StalenessConfig(on_stale="resample"), rollout(24, 8, 24, 0), late)


def test_correct_weighs_stale_rows_token_by_token():
    found = rollout(24, 16, 24, 8)
    sampler = torch.tensor([[0.5, 0.5, 0.5], [0.25, 1, 1], [0.5, 0.5, 1], [0.1, 0.8, 1]]).log()
    found = replace(found, sampler_logprobs=sampler)
    trainers = torch.full((4, 3), 0.4).log()
    _, freshness = decide(StalenessConfig(), found, refuse)
    freshness = freshness.weighed(trainers, found, cap=2.0)
    expected = [[1, 1, 1], [1.6, 0, 0], [1, 1, 0], [2, 0.5, 0]]
    assert_close(freshness.weights, torch.tensor(expected).float(), rtol=1e-6, atol=0)
    assert freshness.capped.tolist() == [[False] * 3] * 3 + [[True, False, False]]


def test_correct_all_weighs_what_is_not_stale_as_well():
    found = rollout_of(RESPONSES)
    half = torch.full((4, 3), 0.5).log()
    for rule in ("drop", "correct", "use"):
        config = StalenessConfig(on_stale=rule, correct_all=True)
        _, freshness = decide(config, found, refuse, versions=(7,))
        weights = freshness.weighed(half, found, cap=2.0).weights
        assert weights.equal(found.response_mask * 0.5)


def test_use_changes_nothing():
    found = rollout(0, 0, 0, 0)
    kept, freshness = decide(StalenessConfig(on_stale="use"), found, refuse)
    assert kept is found
    assert freshness.lags.tolist() == [3] * 4
    assert not (freshness.dropped | freshness.corrected).any()


def test_strict_takes_the_exact_version_and_ends_all_ranks():
    config = StalenessConfig(strict=True)
    with pytest.raises(RolloutError, match=r"2 of 4 responses on this rank .* up to 3 updates old"):
        decide(config, rollout(24, 16, 24, 0), refuse)
    with pytest.raises(RolloutError, match=r"`staleness\.strict`: 0 of 4"):
        decide(config, rollout(24, 24, 24, 24), refuse, any_rank=lambda flag: True)
