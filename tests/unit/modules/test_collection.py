"""The stages of a rollout in order, and which responses take part."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from ppo_lightning.configs import KLConfig, PPOConfig, RewardProcessing, SamplingConfig
from ppo_lightning.models import PolicyOutput
from ppo_lightning.modules.collection import Collection
from ppo_lightning.modules.decision import Limits
from ppo_lightning.rewards import RewardPipeline, RewardTerm
from ppo_lightning.rollout import StopRules
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


def collect(**processing):
    """Run the stages; returns what was collected, the stages, and the two networks."""
    networks, reference, stages, engine_calls = Network(), Network(), [], []
    rollout = rollout_of(RESPONSES, truncated=TRUNCATED)

    def generate(model, prompts, **settings):
        engine_calls.append(settings)
        return rollout

    @contextmanager
    def stage(name):
        stages.append(name)
        yield

    collection = Collection(
        networks=networks,
        reference=reference,
        engine=SimpleNamespace(generate=generate),
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
    )
    found = collection.run(
        rollout.prompts,
        iteration=2,
        num_responses=4,
        kl_coef=0.1,
        policy_version=7,
        limits=Limits(),
    )
    return found, stages, (networks, reference, engine_calls)


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
    assert engine_calls[0]["policy_version"] == 7
    assert found.experience.iteration == 2
    assert list(found.completions.responses) == ["def", "gh", "", "i"]


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
