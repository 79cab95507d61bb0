"""The project's whole pipeline, from sampling to backward, against the exact policy gradient.

One iteration of 16,384 responses from a policy that differs from its reference, one minibatch,
λ = 1: the gradient that reaches the optimiser, rescaled for whitening and for the token mean, must
be that of E[reward] − β·KL. Real faults, put in one at a time, move it out of the bounds.
"""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

import ppo_lightning.rollout.engines.slots as slots
import ppo_lightning.rollout.experience as experience
from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    GroupConfig,
    GuardConfig,
    OptimizerConfig,
    PPOConfig,
    ReferenceConfig,
)
from ppo_lightning.functional import last_index
from ppo_lightning.models.layout import TokenLayout
from ppo_lightning.rewards import RewardTerm
from ppo_lightning.rollout import RolloutDataModule
from tests.helpers.exact_problem import EOS, ExactReward, export_problem, make_problem
from tests.helpers.optimum import exact_module, silent_trainer
from tests.helpers.runs import Recorder

BETA, ROLLOUTS = 0.3, 16_384
MIN_COSINE, NORM_RATIOS = 0.998, (0.97, 1.03)


class Gradients(pl.Callback):
    """Keeps the actor's gradient as the optimiser is about to see it."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        actor = pl_module.networks.actor
        self.found = {name: p.grad.clone() for name, p in actor.named_parameters()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each family: the problem's files, and a policy a little off the reference."""
    made = {}
    for family in ("phi", "gpt2"):
        folder = tmp_path_factory.mktemp(family)
        exported = export_problem(folder, 0, family)
        off = make_problem(0, family).off_reference_start()
        off.save_pretrained(folder / "off")
        for file in exported.model.glob("token*"):
            (folder / "off" / file.name).write_bytes(file.read_bytes())
        made[family] = (exported, folder / "off", off)
    return made


def build(exported, off, family, *, aggregation, kl_coef, self_check):
    """Module and data of one iteration with one minibatch."""
    module = exact_module(
        off,
        problem=0,
        beta=kl_coef,
        reference=ReferenceConfig(path=str(exported.model)),
        critic_model=CriticConfig(kind="shared", trunk_grad_scale=0.0),
        ppo=PPOConfig(
            num_update_epochs=1,
            target_kl=None,
            gae_lambda=1.0,
            loss_aggregation=aggregation,
            microbatch_tokens=4096 * 7,
        ),
        actor=GroupConfig(lr=1e-6, max_grad_norm=None),
        optimizer=OptimizerConfig(name="SGD"),
        guards=GuardConfig(self_check=self_check, advice="off"),
        rewards=[RewardTerm(name="exact", component=ExactReward(0, family))],
    )
    buffer = BufferConfig(num_prompts=ROLLOUTS, num_minibatches=1)
    return module, RolloutDataModule(str(exported.prompts), buffer=buffer, chat=False, seed=1)


def compare(folders, family, *, aggregation="token", kl_coef=BETA, self_check="error"):
    """Return cosine and norm ratio of the pipeline's gradient and the exact one."""
    exported, off, policy = folders[family]
    settings = {"aggregation": aggregation, "kl_coef": kl_coef, "self_check": self_check}
    module, data = build(exported, off, family, **settings)
    recorder, gradients = Recorder(), Gradients()
    silent_trainer(off, max_epochs=1, callbacks=[recorder, gradients]).fit(module, data)
    exact = make_problem(0, family).objective_gradient(policy, beta=BETA)
    scale = rescaling(recorder)
    ours = torch.cat([-scale * gradients.found[name].flatten() for name in exact])
    true = torch.cat([g.flatten() for g in exact.values()])
    cosine = torch.cosine_similarity(ours, true, dim=0)
    return float(cosine), float(ours.norm() / true.norm())


def rescaling(recorder):
    """Undo whitening (whose mean is the baseline) and the division by tokens."""
    shaped = recorder.collected[0].shaped
    spread = shaped.raw_advantages[shaped.mask].double().std(correction=0)
    tokens_per_response = shaped.mask.sum() / len(shaped.mask)
    return float(spread * tokens_per_response)


@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_the_gradient_is_that_of_the_objective(folders, family):
    cosine, ratio = compare(folders, family)
    print(f"{family}: cosine {cosine:.5f}, norm ratio {ratio:.4f}")
    assert cosine >= MIN_COSINE
    assert NORM_RATIOS[0] <= ratio <= NORM_RATIOS[1]


def padding_attended(monkeypatch):
    true = TokenLayout.of

    def attended(sequences, *, final=False, **_):
        layout = true(sequences, packed=False, final=final)
        ones = torch.ones_like(layout.inputs.attention_mask)
        inputs = layout.inputs._replace(attention_mask=ones, position_ids=ones.cumsum(1) - 1)
        return replace(layout, inputs=inputs)

    monkeypatch.setattr(TokenLayout, "of", attended)


def score_one_token_early(monkeypatch):
    true = experience.token_rewards

    def early(scores, kl, mask, **settings):
        rewards = true(torch.zeros_like(scores), kl, mask, **settings)
        places = (last_index(mask) - 1).clamp(min=0)
        return rewards.scatter_add(1, places[:, None], scores[:, None].to(rewards))

    monkeypatch.setattr(experience, "token_rewards", early)


def kl_one_token_late(monkeypatch):
    true = experience.token_rewards

    def late(scores, kl, mask, **settings):
        return true(scores, torch.cat([kl[:, -1:], kl[:, :-1]], 1), mask, **settings)

    monkeypatch.setattr(experience, "token_rewards", late)


def end_token_masked_out(monkeypatch):
    true = experience.build_experience

    def masked(rollout, *args, **settings):
        mask = rollout.response_mask & (rollout.response_ids != EOS)
        return true(replace(rollout, response_mask=mask), *args, **settings)

    monkeypatch.setattr("ppo_lightning.modules.collection.build_experience", masked)


def logits_shifted(monkeypatch):
    true = TokenLayout.of

    def shifted(sequences, **settings):
        layout = true(sequences, **settings)
        return replace(layout, places=layout.places - 1)

    monkeypatch.setattr(TokenLayout, "of", shifted)


def sampled_at_another_temperature(monkeypatch):
    true = slots.draw_tokens

    def colder(logits, uniforms, **settings):
        return true(logits / 0.7, uniforms, **settings)

    monkeypatch.setattr(slots, "draw_tokens", colder)


FAULTS = [
    padding_attended,
    score_one_token_early,
    kl_one_token_late,
    end_token_masked_out,
    logits_shifted,
    sampled_at_another_temperature,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_in_the_pipeline_shows_in_the_gradient(folders, monkeypatch, fault):
    fault(monkeypatch)
    assert_out_of_bounds(*compare(folders, "phi", self_check="off"))


@pytest.mark.parametrize("settings", [{"aggregation": "sequence"}, {"kl_coef": 0.0}], ids=str)
def test_another_objective_shows_in_the_gradient(folders, settings):
    """Per-sequence means, and the KL left out."""
    assert_out_of_bounds(*compare(folders, "phi", **settings))


def assert_out_of_bounds(cosine, ratio):
    print(f"cosine {cosine:.5f}, norm ratio {ratio:.4f}")
    assert cosine < MIN_COSINE or not NORM_RATIOS[0] <= ratio <= NORM_RATIOS[1]
