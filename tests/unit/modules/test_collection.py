"""The stages of a rollout in order, and which responses take part."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from ppo_lightning.configs import (
    KLConfig,
    PPOConfig,
    RewardProcessing,
    SamplingConfig,
    StalenessConfig,
)
from ppo_lightning.models import PolicyOutput
from ppo_lightning.modules.collection import Collection
from ppo_lightning.modules.decision import Limits
from ppo_lightning.rewards import RewardPipeline, RewardTerm
from ppo_lightning.rollout import PolicyVersions, StopRules
from tests.helpers.buffers import rollout_of
from tests.helpers.completions import Says
from tests.helpers.scripted import Letters

RESPONSES = [[3, 4, 5], [6, 7], [], [8]]
TRUNCATED = [False, True, False, False]
SCORES = [1.0, 2.0, 3.0, float("nan")]


class Network:
    """Says the same of every token, and remembers how it was asked."""

    actor = torch.nn.Identity()
    has_frozen_trunk = False

    def packs(self, sequences):
        return False

    def modules(self):
        return ()

    def parameters(self):
        return ()

    def __init__(self):
        self.asked = []

    def __call__(self, sequences, **settings):
        self.asked.append(settings)
        zeros = torch.zeros(sequences.response_mask.shape)
        return PolicyOutput(zeros, zeros, zeros, None, torch.zeros(len(sequences)))

    def logprobs(self, sequences, **settings):
        return self(sequences, **settings)


class Engine:
    """Answers by a given rollout, and remembers how it was asked.

    Args:
        rollout: The answers.
        sampled_at: Temperature of the first ones, if not the one that was asked for.
    """

    def __init__(self, rollout, sampled_at):
        self.rollout, self.sampled_at, self.calls = rollout, sampled_at, []

    def generate(self, model, prompts, **settings):
        self.calls.append(settings)
        asked = settings["sampling"].temperature
        if len(self.calls) == 1:
            return replace(self.rollout, temperature=self.sampled_at or asked)
        return replace(self.rollout, temperature=asked, policy_version=settings["policy_version"])


def collect(sampled_at=None, version=7, on_stale="correct", **processing):
    """Run the stages; returns what was collected, the stages, and the two networks.

    Args:
        sampled_at: Temperature of the first rollout, if not the one that was asked for.
        version: Of the current weights; the first rollout's is 7.
        on_stale: What becomes of it if it is older.
        processing: Settings of ``RewardProcessing``.
    """
    networks, reference, stages, versions = Network(), Network(), [], PolicyVersions()
    rollout = rollout_of(RESPONSES, truncated=TRUNCATED)
    engine = Engine(rollout, sampled_at)
    versions.note(rollout.policy_version)

    @contextmanager
    def stage(name):
        stages.append(name)
        yield

    collection = Collection(
        networks=networks,
        reference=reference,
        engine=engine,
        rewards=RewardPipeline(
            [RewardTerm(name="s", component=Says(SCORES))],
            RewardProcessing(on_nonfinite="drop", **processing),
        ),
        tokenizer=Letters(),
        stops=StopRules(end_ids=(5,), pad_id=0),
        sampling=SamplingConfig(temperature=0.7),
        ppo=PPOConfig(),
        kl=KLConfig(),
        stage=stage,
        precision=nullcontext,
        staleness=StalenessConfig(on_stale=on_stale),
        versions=versions,
    )
    found = collection.run(
        rollout.prompts,
        iteration=2,
        num_responses=4,
        kl_coef=0.1,
        policy_version=version,
        limits=Limits(),
    )
    return found, stages, (networks, reference, engine.calls)


def test_stages_run_in_their_order_and_all_networks_at_one_temperature():
    """T11."""
    found, stages, (networks, reference, engine_calls) = collect()
    assert stages == ["rollout", "reward", "scoring"]
    temperatures = [
        networks.asked[0]["temperature"],
        reference.asked[0]["temperature"],
        engine_calls[0]["sampling"].temperature,
    ]
    assert temperatures == [0.7] * 3
    assert found.experience.temperature == 0.7
    assert engine_calls[0]["policy_version"] == 7
    assert found.experience.iteration == 2
    assert list(found.completions.responses) == ["def", "gh", "", "i"]


def test_t11_what_is_sampled_again_gets_the_temperature_of_the_buffer_that_it_joins():
    stale = {"sampled_at": 0.6, "on_stale": "resample", "version": 9}
    found, _, (networks, _, engine_calls) = collect(**stale)
    assert [call["sampling"].temperature for call in engine_calls] == [0.7, 0.6]
    assert networks.asked[0]["temperature"] == found.experience.temperature == 0.6


def test_t11_what_was_sampled_at_another_temperature_is_scored_and_kept_with_it():
    found, _, (networks, reference, engine_calls) = collect(sampled_at=0.6)
    assert engine_calls[0]["sampling"].temperature == 0.7
    assert networks.asked[0]["temperature"] == reference.asked[0]["temperature"] == 0.6
    assert found.experience.temperature == 0.6


@pytest.mark.parametrize(
    ("processing", "used"),
    [({}, [True, True, False, False]), ({"mask_truncated": True}, [True, False, False, False])],
    ids=str,
)
def test_t18_what_has_no_token_or_score_is_left_out_and_cut_ones_if_so_configured(processing, used):
    found, _, _ = collect(**processing)
    assert found.kept.tolist() == [True, True, False, False]
    assert found.shaped.mask.any(1).tolist() == used
    assert found.experience.sequences.response_mask.any(1).tolist() == used
    assert found.experience.advantages.isfinite().all()
    assert len(found.experience) == 4  # a row stays a row: ranks and minibatches keep their sizes
