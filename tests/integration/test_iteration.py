"""One iteration after another on tiny models: what must hold whatever the model."""

import gc
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.configs import (
    GroupConfig,
    GuardConfig,
    KLConfig,
    LoraConfig,
    OptimizerConfig,
    RewardProcessing,
)
from ppo_lightning.errors import UpdateError
from ppo_lightning.modules import Request
from ppo_lightning.rewards import Reward, RewardTerm
from ppo_lightning.rollout import NativeEngine
from tests.helpers.cases import crossed
from tests.helpers.runs import PoisonedAt, data_module, fit, parameters, ppo_module, trainer
from tests.helpers.tiny_models import build_gpt2

SGD = OptimizerConfig(name="SGD")


def test_the_policy_starts_at_the_reference_with_ratio_one(tiny_model_dir, tmp_path):
    """T11: sampling, update and reference share one distribution, here at another temperature."""
    module = ppo_module(tiny_model_dir, sampling={"temperature": 0.7})
    first, second, _ = fit(tmp_path, module, data_module()).stats
    assert first.kl_ref == 0
    assert first.first_ratio_error < 1e-5
    assert second.kl_ref != 0  # it has moved
    assert second.first_ratio_error < 1e-5


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_t10_dropout_is_off_everywhere(tmp_path, lora):
    folder = build_gpt2(tmp_path / "m", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    module = ppo_module(folder, policy={"lora": lora})
    stats = fit(tmp_path / "run", module, data_module()).stats
    assert stats[0].kl_ref == 0
    assert max(s.first_ratio_error for s in stats) < 1e-5


@pytest.fixture(scope="module")
def plain(tiny_model_dir, tmp_path_factory):
    """Parameters after two iterations with nothing set."""
    module = ppo_module(tiny_model_dir)
    folder = tmp_path_factory.mktemp("plain")
    fit(folder, module, data_module(), max_epochs=2, enable_checkpointing=False)
    return parameters(module)


SETTINGS = (
    {"ppo": {"objective": "penalty"}},
    {"ppo": {"clip_range_high": 0.3, "dual_clip": 3.0, "ent_coef": 0.01}},
    {"ppo": {"loss_aggregation": "sequence", "value_clip_range": None}},
    {"ppo": {"value_huber_delta": 1.0, "value_gae_lambda": 1.0, "bootstrap_truncated": True}},
    {"ppo": {"whiten_advantages": False}},
    {"critic_model": {"kind": "shared", "trunk_grad_scale": 0.5}},
    {"policy": {"lora": LoraConfig(rank=4)}, "critic_model": {"kind": "shared"}},
    {"policy": {"gradient_checkpointing": True}},
    {"kl": KLConfig(estimator="full")},
    {"kl": KLConfig(estimator="k2")},
    {"kl": KLConfig(estimator="k3", placement="last")},
    {"kl": KLConfig(estimator="abs")},
    {"kl": KLConfig(estimator="k2", placement="loss")},
    {"kl": KLConfig(estimator="full", placement="loss")},
    {"reward_processing": RewardProcessing(normalize="batch", missing_eos_penalty=0.5)},
    {
        "reward_processing": RewardProcessing(mask_truncated=True),
        "sampling": {"stop_token_ids": range(5, 35)},  # so that some do end
    },
    {"actor": GroupConfig(lr=1e-3, warmup=2, schedule="cosine", max_grad_norm=None)},
    {"optimizer": OptimizerConfig(name="SGD", options={"momentum": 0.9})},
)


def each_with_one_family():
    """Settings and families in turn; a setting with the other family is for the slow tests."""
    for number, settings in enumerate(SETTINGS):
        for place, family in enumerate(("gpt2", "llama")):
            other = () if number % 2 == place else pytest.mark.slow
            yield pytest.param(family, settings, marks=other, id=f"{family}-{settings}")


@pytest.mark.parametrize(
    ("tiny_model_dir", "settings"), [*each_with_one_family()], indirect=["tiny_model_dir"]
)
def test_every_setting_runs_and_changes_the_result(tiny_model_dir, plain, tmp_path, settings):
    module = ppo_module(tiny_model_dir, **settings)
    stats = fit(tmp_path, module, data_module(), max_epochs=2, enable_checkpointing=False).stats
    assert all(p.isfinite().all() for p in module.parameters())
    assert stats[-1].steps_taken == 4
    if "gradient_checkpointing" in str(settings):
        for name, value in plain.items():
            assert_close(dict(module.named_parameters())[name], value, msg=name)
    elif "lora" not in str(settings):
        assert any(
            not value.equal(dict(module.named_parameters())[name])
            for name, value in plain.items()
            if name in dict(module.named_parameters())
        )


def test_t35_what_the_critic_says_at_padding_reaches_nothing(tiny_model_dir, tmp_path):
    def shout(_, __, inputs, output):
        padding = inputs["attention_mask"] == 0
        heard.append(bool(padding.any()))
        output.last_hidden_state = output.last_hidden_state.masked_fill(padding[..., None], 100.0)
        return output

    results, heard = [], []
    for loud in (False, True):
        module = ppo_module(tiny_model_dir, policy={"padding_free": False})
        module.configure_model()
        if loud:
            module.networks.critic.backbone.register_forward_hook(shout, with_kwargs=True)
        stats = fit(tmp_path, module, data_module(), enable_checkpointing=False).stats[-1]
        results.append({k: v for k, v in stats.to_log().items() if k[:4] not in ("time", "run/")})
    assert any(heard)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("tiny_model_dir", "aggregation"),
    crossed(("gpt2", "token"), ("llama", "sequence")),
    indirect=["tiny_model_dir"],
)
def test_t38_microbatches_do_not_change_the_parameters(tiny_model_dir, tmp_path, aggregation):
    """Whole minibatches, and cut by three budgets, in float64: equal to rounding (T39 as well).

    Llama's norms are float32 in a float64 model, too, and prompts are shared within a microbatch.
    """
    rounding = 1e-8 if "llama" in tiny_model_dir.name else 1e-11
    runs = []
    for budget in (None, 60, 25, 1):
        module = ppo_module(
            tiny_model_dir,
            policy={"dtype": "float64"},
            optimizer=SGD,
            ppo={"microbatch_tokens": budget, "loss_aggregation": aggregation},
            actor=GroupConfig(lr=1e-2, max_grad_norm=None),
        )
        fit(tmp_path, module, data_module(), max_epochs=2, enable_checkpointing=False)
        runs.append(parameters(module))
    for other in runs[1:]:
        for name, value in runs[0].items():
            assert_close(other[name], value, rtol=0, atol=rounding, msg=name)


def test_t40_sizes_that_do_not_divide(tiny_model_dir, tmp_path):
    module = ppo_module(tiny_model_dir, sampling={"batch_size": 3}, ppo={"microbatch_tokens": 30})
    data = data_module(buffer={"num_prompts": 7, "num_minibatches": 4})
    recorder = fit(tmp_path, module, data, enable_checkpointing=False)
    for stats, collected in zip(recorder.stats, recorder.collected, strict=True):
        assert stats.num_responses == 7
        assert stats.steps_taken == 8
        assert sorted(collected.experience.indices.tolist()) == list(range(7))


class SpeltOut(NativeEngine):
    """Answers every prompt with the letters of a word that is one token as well."""

    def __init__(self, ids):
        super().__init__()
        self.ids = ids

    def generate(self, model, prompts, **settings):
        ids = torch.tensor([self.ids] * len(prompts))
        return replace(
            super().generate(model, prompts, **settings),
            response_ids=ids,
            response_mask=torch.ones_like(ids, dtype=torch.bool),
            sampler_logprobs=torch.zeros(ids.shape),
        )


def test_t19_sampled_ids_go_to_the_loss_and_text_to_the_rewards(tiny_gpt2_dir, tmp_path):
    seen = []

    class Watcher(Reward):
        def __call__(self, completions):
            seen.append(completions)
            return [0.0] * len(completions)

    # The letters were not drawn, so the sampler's log-probabilities are of other ids.
    unchecked = GuardConfig(self_check="off", advice="off")
    watched = [RewardTerm(name="w", component=Watcher())]
    module = ppo_module(tiny_gpt2_dir, rewards=watched, guards=unchecked)
    letters = module.tokenizer.convert_tokens_to_ids(list("hello"))
    assert len(module.tokenizer.encode("hello")) == 1  # tokenised again it would be other ids
    module.engine = SpeltOut(letters)
    recorder = fit(tmp_path, module, data_module(), max_epochs=1, enable_checkpointing=False)
    assert seen[0].responses == ["hello"] * 8
    assert seen[0].response_ids == [letters] * 8
    assert recorder.collected[0].experience.sequences.response_ids.tolist() == [letters] * 8


class EmptyAnswers(NativeEngine):
    """Takes every token away from the first response."""

    def generate(self, model, prompts, **settings):
        rollout = super().generate(model, prompts, **settings)
        mask = rollout.response_mask.clone()
        mask[0] = False
        return replace(
            rollout,
            response_mask=mask,
            sampler_logprobs=rollout.sampler_logprobs.masked_fill(~mask, 0),
        )


class ScoresFirst(Reward):
    """Scores the first response as told, and the others by their place."""

    def __init__(self, first):
        self.first, self.texts = first, []

    def __call__(self, completions):
        self.texts.append(completions.responses[0])
        return [self.first, *(0.1 * place for place in range(1, len(completions)))]


def without_tokens(model_dir, folder, first_score):
    """A run whose first response has no tokens, and that score: parameters, records, texts."""
    reward = ScoresFirst(first_score)
    module = ppo_module(
        model_dir, engine=EmptyAnswers(), rewards=[RewardTerm(name="w", component=reward)]
    )
    recorder = fit(folder, module, data_module(), enable_checkpointing=False)
    return parameters(module), recorder, reward.texts


def test_t18_a_response_without_tokens_takes_part_in_nothing(tiny_model_dir, tmp_path):
    weights, recorder, texts = without_tokens(tiny_model_dir, tmp_path / "a", 9.0)
    assert texts == [""] * 3
    stats, collected = recorder.stats[0], recorder.collected[0]
    assert (stats.dropped_responses, stats.steps_taken) == (1, 4)
    assert stats.unscored_responses == 0
    others = collected.rollout.response_mask[1:]
    assert stats.score_mean == pytest.approx(0.4)  # of 0.1, 0.2 … 0.7
    assert stats.score_max == pytest.approx(0.7)
    assert stats.response_length_mean == pytest.approx(others.sum().item() / 7)
    entropy = collected.networks.entropy[1:][others].double().mean().item()
    assert stats.entropy == pytest.approx(entropy)
    buffer = collected.experience
    returns, values = (x[1:][others].double() for x in (buffer.returns, buffer.old_values))
    explained = 1 - (returns - values).var(correction=0) / returns.var(correction=0)
    assert stats.explained_variance == pytest.approx(explained.item(), abs=1e-6)
    whitened = buffer.advantages[1:][others].double()
    assert (whitened.mean().item(), whitened.std(correction=0).item()) == pytest.approx(
        (0, 1), abs=1e-4
    )
    # Nor does its score reach anything.
    elsewhere, other, _ = without_tokens(tiny_model_dir, tmp_path / "b", -2.0)
    assert all(weights[name].equal(value) for name, value in elsewhere.items())
    assert [s.score_mean for s in other.stats] == [s.score_mean for s in recorder.stats]


def test_t44_in_bfloat16_the_first_ratio_is_exactly_one_where_the_batch_is_the_same(
    tiny_model_dir, tmp_path
):
    module = ppo_module(
        tiny_model_dir,
        policy={"dtype": "bfloat16", "lora": LoraConfig(rank=2)},
        critic_model={"kind": "shared"},
    )
    data = data_module(buffer={"num_minibatches": 1})
    stats = fit(tmp_path, module, data, enable_checkpointing=False).stats
    assert [s.first_ratio_error for s in stats] == [0, 0, 0]
    assert stats[-1].kl_ref != 0  # it moves all the same


class NaNAt(Reward):
    def __init__(self, row):
        self.row = row

    def __call__(self, completions):
        scores = torch.arange(float(len(completions)))
        scores[self.row] = torch.nan
        return scores


def test_a_dropped_response_is_counted_and_used_nowhere(tiny_model_dir, tmp_path):
    module = ppo_module(
        tiny_model_dir,
        rewards=[RewardTerm(name="nan", component=NaNAt(2))],
        reward_processing=RewardProcessing(on_nonfinite="drop"),
    )
    recorder = fit(tmp_path, module, data_module(), enable_checkpointing=False)
    assert [s.dropped_responses for s in recorder.stats] == [1, 1, 1]
    assert [s.unscored_responses for s in recorder.stats] == [1, 1, 1]
    experience = recorder.collected[0].experience
    assert not experience.sequences.response_mask[2].any()
    assert experience.advantages.isfinite().all()
    assert all(p.isfinite().all() for p in module.parameters())


def test_t41_a_loss_that_is_not_finite_skips_the_step_and_is_counted(tiny_model_dir, tmp_path):
    module = ppo_module(tiny_model_dir)
    PoisonedAt(module, calls={2})
    stats = fit(tmp_path, module, data_module(), enable_checkpointing=False).stats
    assert [s.steps_skipped_nonfinite for s in stats] == [1, 0, 0]
    assert stats[0].steps_taken == 3
    assert stats[0].policy_loss == pytest.approx(stats[0].policy_loss)  # not nan
    assert all(p.isfinite().all() for p in module.parameters())


def test_the_run_ends_after_too_many_skipped_steps(tiny_llama_dir, tmp_path):
    module = ppo_module(tiny_llama_dir, guards=GuardConfig(max_skipped_steps=3, advice="off"))
    PoisonedAt(module, calls=range(2, 100))
    with pytest.raises(UpdateError, match="3 optimiser steps in a row"):
        fit(tmp_path, module, data_module(), enable_checkpointing=False)
    assert all(p.isfinite().all() for p in module.parameters())


def counted(step, calls):
    def wrapper(*args, **kwargs):
        calls.append(1)
        return step(*args, **kwargs)

    return wrapper


def test_the_kl_limit_stops_an_update_before_the_step(tiny_model_dir, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(torch.optim.SGD, "step", counted(torch.optim.SGD.step, steps))
    module = ppo_module(
        tiny_model_dir, ppo={"target_kl": 1e-6}, actor=GroupConfig(lr=0.1), optimizer=SGD
    )
    stats = fit(tmp_path, module, data_module(), max_epochs=1, enable_checkpointing=False).stats
    assert len(steps) == 1  # the first step has KL 0; the second is not taken
    assert stats[0].kl_stopped == 1
    assert stats[0].steps_taken == 1
    assert stats[0].steps_skipped_kl == 3
    assert stats[0].kl_old_last > 1e-6
    assert all(p.grad is None for p in module.parameters())


def test_same_seed_same_run_bitwise(tiny_model_dir, tmp_path):
    first, second = ppo_module(tiny_model_dir), ppo_module(tiny_model_dir)
    options = {"max_epochs": 2, "enable_checkpointing": False}
    runs = [fit(tmp_path, m, data_module(), **options) for m in (first, second)]
    for name, value in parameters(first).items():
        assert value.equal(dict(second.named_parameters())[name]), name
    ids = [[c.rollout.response_ids.tolist() for c in run.collected] for run in runs]
    assert ids[0] == ids[1]


def test_groups_of_responses_share_their_prompt(tiny_llama_dir, tmp_path):
    data = data_module(buffer={"num_prompts": 3, "responses_per_prompt": 2})
    recorder = fit(
        tmp_path, ppo_module(tiny_llama_dir), data, max_epochs=1, enable_checkpointing=False
    )
    prompts = recorder.collected[0].completions.prompts
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3


def test_t61_nothing_grows_from_iteration_to_iteration(tiny_llama_dir, tmp_path):
    counts, scalars = [], []

    class Counter(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            gc.collect()
            tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
            counts.append(sum(tensor.dim() > 0 for tensor in tensors))
            scalars.append(len(tensors) - counts[-1])

    pl.seed_everything(0, verbose=False)
    # Without the recorder of the other tests, which keeps every buffer.
    settings = {"max_epochs": 8, "enable_checkpointing": False, "callbacks": [Counter()]}
    trainer(tmp_path, **settings).fit(ppo_module(tiny_llama_dir), data_module())
    assert len(set(counts[2:])) == 1
    # Lightning keeps what was logged last, and not every number is defined in every iteration.
    assert max(scalars[5:]) <= min(scalars[2:5]) + 3


class AlwaysNaN(Reward):
    def __call__(self, completions):
        return [float("nan")] * len(completions)


def test_a_buffer_of_which_nothing_is_left_moves_no_parameter(tiny_llama_dir, tmp_path):
    module = ppo_module(
        tiny_llama_dir,
        rewards=[RewardTerm(name="nan", component=AlwaysNaN())],
        reward_processing=RewardProcessing(on_nonfinite="drop"),
        guards=GuardConfig(advice="off"),
    )
    module.configure_model()
    before = parameters(module)
    with pytest.warns(UserWarning, match="took no optimiser step: every response was dropped"):
        stats = fit(tmp_path, module, data_module(), enable_checkpointing=False).stats
    assert [s.dropped_responses for s in stats] == [8, 8, 8]
    assert [s.steps_taken for s in stats] == [0, 0, 0]
    assert all(value.equal(dict(module.named_parameters())[n]) for n, value in before.items())


class Cutter(pl.Callback):
    """Asks for a tenth of the actor's rate after the first iteration."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.controls.request(Request(source="test", dial="actor_lr_factor", factor=0.1))


def test_a_rate_asked_for_between_iterations_holds_from_the_next_first_step(
    tiny_llama_dir, tmp_path
):
    rates = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    fit(
        tmp_path,
        ppo_module(tiny_llama_dir),
        data_module(),
        max_epochs=2,
        enable_checkpointing=False,
        callbacks=[Watch(), Cutter()],
    )
    assert rates == pytest.approx([1e-3] * 4 + [1e-4] * 4)


def test_the_penalty_coefficient_follows_the_kl_after_the_update(tiny_llama_dir, tmp_path):
    """One step an iteration: before it the KL is 0, after it far above the target."""
    module = ppo_module(
        tiny_llama_dir,
        ppo={"objective": "penalty", "num_update_epochs": 1, "penalty_target": 1e-6},
        actor=GroupConfig(lr=1e-2),
    )
    data = data_module(buffer={"num_minibatches": 1})
    stats = fit(tmp_path, module, data, enable_checkpointing=False).stats
    assert [s.kl_old for s in stats] == pytest.approx([0, 0, 0], abs=1e-6)
    assert [s.penalty_coef for s in stats] == [1, 2, 4]
    assert module.controls["penalty_coef"] == 8
