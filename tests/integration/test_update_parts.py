"""Steps of the actor or the critic alone, texts beside PPO, and buffers without a critic."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.callbacks import (
    AdaptiveKL,
    CheckpointRollback,
    MaxKL,
    RewardPerKL,
    ValueWarmup,
)
from ppo_lightning.configs import (
    GroupConfig,
    KLConfig,
    OptimizerConfig,
    PTXConfig,
    RewardProcessing,
)
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import Request
from tests.helpers.cases import crossed
from tests.helpers.faults import Says
from tests.helpers.runs import PROMPTS, data_module, fit, parameters, ppo_module

CRITICS = [{"kind": "separate"}, {"kind": "shared", "trunk_grad_scale": 1.0}]
TEXTS = ["the cat sat on the red house", "we saw a big bird and the dog ran home"]


class Warmup(pl.Callback):
    """Keeps the actor still in the first iterations."""

    def __init__(self, num_iterations):
        self.last = num_iterations - 1

    def on_fit_start(self, trainer, module):
        request = Request(source="test", dial="train_actor", value=0.0, until=self.last)
        module.controls.request(request)


class States(pl.Callback):
    """Copies of all parameters at the end of each iteration, the start first."""

    def __init__(self):
        self.found = []

    def on_fit_start(self, trainer, module):
        self.found.append(parameters(module))

    def on_iteration_end(self, trainer, module, stats):
        self.found.append(parameters(module))

    def changed(self, before, after):
        """Whether (actor, critic) differ between two of the states."""
        names = [
            name
            for name, value in self.found[after].items()
            if not torch.equal(value, self.found[before][name])
        ]
        critic = [name for name in names if ".critic." in name or "value_head" in name]
        return len(names) > len(critic), len(critic) > 0


def run(folder, tiny, *, callbacks=(), data=None, epochs=2, **overrides):
    """Fit, and return (stats, states, module)."""
    states, module = States(), ppo_module(tiny, **overrides)
    callbacks = [states, *callbacks]
    options = {"max_epochs": epochs, "enable_checkpointing": False}
    found = fit(folder, module, data or data_module(), callbacks=callbacks, **options)
    return found.stats, states, module


@pytest.mark.parametrize("critic", CRITICS, ids=lambda c: c["kind"])
def test_in_value_warmup_the_critic_alone_moves(tmp_path, tiny_model_dir, critic):
    warmup = [Warmup(1)]
    stats, states, module = run(tmp_path, tiny_model_dir, callbacks=warmup, critic_model=critic)
    assert states.changed(0, 1) == (False, True)
    assert states.changed(1, 2) == (True, True)
    first, second = stats
    assert (first.policy_loss, first.grad_norm_actor, first.kl_old) == (None, None, None)
    assert first.value_loss > 0
    assert first.steps_taken == second.steps_taken == 4
    assert second.kl_ref == pytest.approx(0, abs=1e-6)  # its responses are the reference's
    moments = module.optimizers().state_dict()["state"]
    assert {int(state["step"]) for state in moments.values()} == {4, 8}


def test_the_actors_schedule_begins_when_its_first_step_is_due(tmp_path, tiny_llama_dir):
    actor = GroupConfig(lr=1e-3, warmup=4, schedule="linear")
    options = {"actor": actor, "critic": replace(actor, lr=3e-3), "epochs": 4}
    stats, states, _ = run(tmp_path, tiny_llama_dir, callbacks=[Warmup(2)], **options)
    assert states.changed(0, 2) == (False, True)
    # Four steps an iteration: the rate of the last one. The critic began at once.
    assert [s.lr_actor for s in stats[:2]] == [None, None]
    assert [s.lr_actor for s in stats[2:]] == pytest.approx([0.75e-3, 0.25e-3])
    assert [s.lr_critic for s in stats] == pytest.approx([2.25e-3, 2.25e-3, 1.25e-3, 0.25e-3])


def test_extra_passes_and_turns_train_what_they_say(tmp_path, tiny_llama_dir):
    extra = {"num_update_epochs": 1, "extra_critic_epochs": 2}
    stats, states, _ = run(tmp_path, tiny_llama_dir, ppo=extra, epochs=1)
    assert stats[0].steps_taken == 2 + 4
    plain, other, _ = run(tmp_path, tiny_llama_dir, ppo={"num_update_epochs": 1}, epochs=1)
    assert plain[0].steps_taken == 2
    assert_same_actor(states, other)


def test_networks_of_their_own_do_not_see_each_others_turns(tmp_path, tiny_llama_dir):
    found = []
    for order in ("together", "in_turn"):
        ppo = {"num_update_epochs": 1, "update_order": order}
        data = data_module(buffer={"num_minibatches": 1})  # the shuffle then only rounds otherwise
        stats, states, _ = run(tmp_path, tiny_llama_dir, ppo=ppo, data=data, epochs=1)
        found.append((stats[0].steps_taken, states))
    (together, one), (in_turn, other) = found
    assert (together, in_turn) == (1, 2)
    for name, value in one.found[1].items():
        assert_close(value, other.found[1][name], rtol=0, atol=1e-5, msg=name)


def assert_same_actor(found, expected):
    for name, value in expected.found[1].items():
        if ".actor." in name:
            assert torch.equal(found.found[1][name], value), name


def test_a_kl_stop_is_the_actors_and_leaves_the_extra_passes(tmp_path, tiny_llama_dir):
    ppo = {"num_update_epochs": 2, "target_kl": 1e-9, "extra_critic_epochs": 1}
    stats, _, _ = run(tmp_path, tiny_llama_dir, ppo=ppo, epochs=1, actor=GroupConfig(lr=0.01))
    assert stats[0].kl_stopped == 1
    assert stats[0].steps_taken == 1 + 2  # one before the stop, and the critic's pass
    assert stats[0].steps_skipped_kl == 3


def test_the_cap_on_the_kl_to_the_reference_stops_an_update(tmp_path, tiny_llama_dir):
    options = {"actor": GroupConfig(lr=2e-3), "ppo": {"num_update_epochs": 6}, "epochs": 4}
    free, _, _ = run(tmp_path, tiny_llama_dir, kl=KLConfig(coef=0.0), **options)
    assert free[-1].kl_ref > 1
    for bound in ({"max_kl_ref": 0.1}, {"max_kl_ref_per_token": 0.02}):
        kl = KLConfig(coef=0.0, **bound)
        found, _, _ = run(tmp_path, tiny_llama_dir, kl=kl, **options)
        assert found[0].kl_capped == 1
        assert 0 < found[0].steps_taken < 12
        assert found[0].steps_skipped_kl == 12 - found[0].steps_taken
        assert all(s.kl_capped or s.kl_returning for s in found)
        assert found[-1].kl_ref < free[-1].kl_ref / 2


@pytest.mark.parametrize("advantage", ["rloo", "group"])
def test_without_a_critic_the_responses_to_a_prompt_are_compared(
    tmp_path, tiny_llama_dir, advantage
):
    data = data_module(buffer={"num_prompts": 4, "responses_per_prompt": 4})
    stats, states, _ = run(
        tmp_path, tiny_llama_dir, ppo={"advantage": advantage}, data=data, epochs=8
    )
    assert states.changed(0, 8) == (True, False)
    assert stats[-1].score_mean > stats[0].score_mean + 0.3
    assert stats[0].value_loss is None
    assert stats[0].prompt_score_std > 0
    assert stats[0].flat_prompt_share == 0


@pytest.mark.parametrize(
    "options",
    [
        {"ppo": {"advantage": "group"}},
        {"ppo": {"drop_flat_prompts": True}},
        {"reward_processing": RewardProcessing(normalize="group")},
    ],
    ids=str,
)
def test_what_compares_responses_needs_more_than_one(tmp_path, tiny_llama_dir, options):
    with pytest.raises(ConfigError, match=r"buffer\.responses_per_prompt` to 2"):
        run(tmp_path, tiny_llama_dir, **options)


def test_texts_beside_ppo_become_likelier(tmp_path, tiny_model_dir):
    ptx = PTXConfig(texts=TEXTS, coef=1.0, batch_size=2, max_length=8)
    stats, _, _ = run(tmp_path, tiny_model_dir, ptx=ptx, epochs=6)
    assert stats[-1].ptx_loss < stats[0].ptx_loss - 1
    mixed = replace(ptx, every_n_iterations=2)
    found, _, _ = run(tmp_path, tiny_model_dir, ptx=mixed, epochs=3)
    assert [s.ptx_loss is not None for s in found] == [True, False, True]


def test_answers_beside_ppo_become_likelier_and_their_prompts_do_not_count(
    tmp_path, tiny_llama_dir
):
    """Of a demonstration the answer alone is learned, as in supervised fine-tuning."""
    pairs = [{"prompt": "the cat", "response": "sat on"}, {"prompt": "a", "response": "red bird"}]
    ptx = PTXConfig(demonstrations=pairs, coef=1.0, batch_size=2, max_length=8)
    stats, _, module = run(tmp_path, tiny_llama_dir, ptx=ptx, epochs=6)
    assert stats[-1].ptx_loss < stats[0].ptx_loss - 1
    learned = [piece.num_learned for piece in module.updater.text_mix.pieces]
    assert learned == [3, 3]  # two words and the end
    with pytest.raises(ValueError, match="either `texts` or `demonstrations`"):
        PTXConfig(texts=TEXTS, demonstrations=pairs)


def test_a_buffer_in_tokens_follows_the_length_of_responses(tmp_path, tiny_llama_dir):
    data = data_module(buffer={"num_prompts": 4, "num_tokens": 60})
    stats, _, _ = run(tmp_path, tiny_llama_dir, data=data, epochs=3)
    counts = [s.num_responses for s in stats]
    assert counts[0] == 4
    assert counts[1] == round(60 / stats[0].response_length_mean)
    assert stats[1].num_tokens == pytest.approx(60, rel=0.25)
    assert data.position == sum(counts)


def test_rates_follow_the_minibatch(tmp_path, tiny_llama_dir):
    scaled = OptimizerConfig(lr_scaling="sqrt", lr_batch_size=16)  # minibatches are of 4
    stats, _, _ = run(tmp_path, tiny_llama_dir, optimizer=scaled, epochs=1)
    assert (stats[0].lr_actor, stats[0].lr_critic) == pytest.approx((0.5e-3, 1.5e-3))


class NanValues:
    """Makes the critic's first value of one response a nan while the buffer is scored."""

    def __init__(self, module):
        self.done = False
        module.configure_model()
        module.networks.register_forward_hook(self)

    def __call__(self, networks, args, output):
        if torch.is_grad_enabled() or self.done:
            return None
        self.done = True
        values = output.values.clone()
        values[0, 0] = torch.nan
        return output._replace(values=values)


def test_t41_a_network_that_says_nan_costs_one_response(tmp_path, tiny_llama_dir):
    module, states = ppo_module(tiny_llama_dir), States()
    NanValues(module)
    found = fit(tmp_path, module, data_module(), callbacks=[states], max_epochs=1).stats
    assert (found[0].nonfinite_responses, found[0].dropped_responses) == (1, 1)
    assert found[0].steps_taken == 4
    assert states.changed(0, 1) == (True, True)
    assert all(value.isfinite().all() for value in states.found[1].values())


def test_prompts_without_spread_are_left_out(tmp_path, tiny_llama_dir):
    data = data_module(prompts=PROMPTS[:4], buffer={"num_prompts": 4, "responses_per_prompt": 2})
    ppo, processing = {"drop_flat_prompts": True}, RewardProcessing(clip=1e-6)
    module = ppo_module(tiny_llama_dir, ppo=ppo, reward_processing=processing)
    found = fit(tmp_path, module, data, max_epochs=1)
    (collected,) = found.collected
    scores = collected.result.scores.view(4, 2)  # clipped to one of two values
    differing = (scores[:, 0] != scores[:, 1]).repeat_interleave(2)
    assert 0 < differing.sum() < 8
    assert collected.experience.sequences.response_mask.any(1).equal(differing)


@pytest.mark.parametrize(
    ("ill", "warmup"),
    crossed((1, 6), (2, 0)),
)
def test_a_rollback_in_or_after_the_warmup_keeps_the_schedule(
    tmp_path, tiny_llama_dir, warmup, ill
):
    """Where the schedule goes back, so does the count of steps that the actor sat out."""
    callbacks = [ValueWarmup(num_iterations=2), Says("policy_collapse", ill)]
    callbacks.append(CheckpointRollback(actor_lr_factor=1.0, critic_lr_factor=1.0))
    stats, _, _ = run(
        tmp_path,
        tiny_llama_dir,
        callbacks=callbacks,
        epochs=6,
        actor=GroupConfig(lr=1e-3, warmup=warmup),
    )
    rates = [s.lr_actor for s in stats if s.lr_actor is not None]
    assert rates == sorted(rates)
    assert 0 < rates[0] <= rates[-1] == 1e-3


def test_in_turn_the_first_critic_pass_is_no_step_of_the_actors_schedule(tmp_path, tiny_llama_dir):
    ppo = {"num_update_epochs": 1, "update_order": "in_turn"}
    actor = GroupConfig(lr=1e-3, warmup=4)
    stats, _, _ = run(tmp_path, tiny_llama_dir, ppo=ppo, actor=actor, epochs=3)
    # Two of its own steps an iteration; the rate of the last of them.
    assert [s.lr_actor for s in stats] == pytest.approx([0.25e-3, 0.75e-3, 1e-3])


def test_a_module_begins_anew_with_every_fit(tmp_path, tiny_llama_dir):
    module = ppo_module(tiny_llama_dir)
    bounds = [ValueWarmup(num_iterations=1), MaxKL(max_kl_ref=1e-9), AdaptiveKL(horizon=40)]
    options = {"max_epochs": 2, "enable_checkpointing": False}
    fit(tmp_path / "a", module, data_module(), callbacks=bounds, **options)
    assert module.controls["max_kl_ref"] == 1e-9
    found = fit(tmp_path / "b", module, data_module(), callbacks=[RewardPerKL()], **options)
    assert module.controls["max_kl_ref"] == float("inf")
    assert found.stats[0].lr_actor == 1e-3


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_what_a_law_asked_for_ends_with_it(tmp_path, tiny_llama_dir):
    """A resumed run has the callbacks of its own config."""
    laws = [MaxKL(max_kl_ref=1e-9), AdaptiveKL(target=0.01, horizon=40)]
    module = ppo_module(tiny_llama_dir)
    fit(tmp_path / "a", module, data_module(), callbacks=laws, max_epochs=2)
    assert module.controls["kl_coef"] != module.kl.coef
    resumed = ppo_module(tiny_llama_dir)
    last = next((tmp_path / "a").rglob("epoch=1*.ckpt"))
    fit(tmp_path / "b", resumed, data_module(), ckpt=last, max_epochs=3)
    assert resumed.controls["max_kl_ref"] == float("inf")
    assert resumed.controls["kl_coef"] == resumed.kl.coef


def test_ppo_penaltys_law_rests_while_the_policy_does(tmp_path, tiny_llama_dir):
    ppo = {"objective": "penalty", "penalty_coef": 1.0}
    stats, _, _ = run(
        tmp_path, tiny_llama_dir, ppo=ppo, callbacks=[ValueWarmup(num_iterations=3)], epochs=4
    )
    assert [s.penalty_coef for s in stats] == [1.0] * 4


def test_a_stop_that_min_epochs_delays_shortens_no_iteration(tmp_path, tiny_llama_dir):
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    options = {"enable_checkpointing": False, "min_epochs": 4, "max_epochs": 6}
    found = fit(tmp_path, ppo_module(tiny_llama_dir), data_module(), callbacks=[Stop()], **options)
    assert [s.steps_taken for s in found.stats] == [4.0] * 4


def test_beyond_the_bound_the_buffer_trains_the_way_back(tmp_path, tiny_llama_dir):
    class Bound(pl.Callback):
        """Comes when the policy is already far away."""

        def on_train_epoch_end(self, trainer, pl_module):
            if pl_module.iteration == 4:
                pl_module.controls.request(Request(source="t", dial="max_kl_ref", value=0.5))

    data = data_module(buffer={"num_prompts": 32, "num_minibatches": 2})
    options = {"kl": KLConfig(coef=0.0), "data": data, "epochs": 16}
    stats, states, _ = run(tmp_path, tiny_llama_dir, callbacks=[Bound()], **options)
    assert stats[4].kl_ref > 1
    assert [s.kl_returning for s in stats[:6]] == [0.0] * 5 + [1.0]
    assert states.changed(5, 6) == (True, False)  # the critic rests
    assert sum(s.kl_ref for s in stats[-4:]) / 4 < 0.75 * stats[5].kl_ref


def test_texts_keep_to_the_budget_and_to_the_models_positions(tmp_path, tiny_llama_dir):
    whole = PTXConfig(texts=TEXTS, batch_size=4, max_length=8)
    losses = []
    for tokens in (None, 9):
        stats, _, _ = run(
            tmp_path, tiny_llama_dir, ptx=whole, epochs=1, ppo={"microbatch_tokens": tokens}
        )
        losses.append(stats[0].ptx_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    with pytest.raises(ConfigError, match=r"`ptx.max_length` \(4096\) exceeds the \d+ positions"):
        run(tmp_path, tiny_llama_dir, ptx=replace(whole, max_length=4096), epochs=1)
