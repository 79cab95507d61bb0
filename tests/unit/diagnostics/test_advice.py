from dataclasses import replace

import pytest

from ppo_lightning.configs import (
    BufferConfig,
    GroupConfig,
    KLConfig,
    PPOConfig,
    RewardProcessing,
    SamplingConfig,
)
from ppo_lightning.diagnostics import RunSettings, advice_text, review, review_scores

USUAL = RunSettings(
    ppo=PPOConfig(),
    kl=KLConfig(),
    actor=GroupConfig(lr=2e-6, warmup=10),
    critic=GroupConfig(lr=6e-6, warmup=10),
    sampling=SamplingConfig(),
    buffer=BufferConfig(num_prompts=64),
    num_parameters=1_000_000_000,
    planned_steps=100,
)


def keys(settings):
    return [advice.key for advice in review(settings)]


def test_usual_settings_are_left_alone():
    assert review(USUAL) == []
    assert advice_text(review(USUAL)) == ""


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"ppo": PPOConfig(num_update_epochs=5)}, "ppo.num_update_epochs"),
        ({"ppo": PPOConfig(target_kl=None)}, "ppo.target_kl"),
        ({"kl": KLConfig(coef=0.0)}, "kl.coef"),
        ({"sampling": SamplingConfig(top_p=0.9)}, "sampling.top_p"),
        ({"sampling": SamplingConfig(top_k=50)}, "sampling.top_k"),
        ({"sampling": SamplingConfig(temperature=0.4)}, "sampling.temperature"),
        ({"sampling": SamplingConfig(temperature=1.6)}, "sampling.temperature"),
        ({"actor": GroupConfig(lr=2e-6)}, "actor.warmup"),
        ({"critic": GroupConfig(lr=6e-6)}, "critic.warmup"),
        ({"planned_steps": 10}, "actor.warmup"),
        ({"critic": GroupConfig(lr=3e-6, warmup=1)}, "critic.lr"),
        ({"critic": GroupConfig(lr=2e-5, warmup=1)}, "critic.lr"),
    ],
)
def test_each_rule_names_its_setting(changes, key):
    assert key in keys(replace(USUAL, **changes))


@pytest.mark.parametrize(
    ("lr", "lora", "fits"),
    [
        (1e-7, False, True),
        (1e-5, False, True),
        (9e-8, False, False),
        (2e-5, False, False),
        (1e-6, True, True),
        (1e-3, True, True),
        (9e-7, True, False),
        (2e-3, True, False),
    ],
)
def test_actor_rate_is_judged_by_what_is_trained(lr, lora, fits):
    run = replace(
        USUAL,
        lora=lora,
        actor=GroupConfig(lr=lr, warmup=1),
        critic=GroupConfig(lr=3 * lr, warmup=1),
    )
    assert ("actor.lr" not in keys(run)) is fits


def test_toy_models_may_take_any_rate():
    fast = replace(
        USUAL, actor=GroupConfig(lr=1e-3, warmup=1), critic=GroupConfig(lr=3e-3, warmup=1)
    )
    assert keys(fast) == ["actor.lr"]
    assert keys(replace(fast, num_parameters=50_000)) == []


@pytest.mark.parametrize("ratio", [2, 5])
def test_bounds_of_the_rates_ratio_are_inside(ratio):
    run = replace(
        USUAL, actor=GroupConfig(lr=1e-6, warmup=1), critic=GroupConfig(lr=ratio * 1e-6, warmup=1)
    )
    assert keys(run) == []


@pytest.mark.parametrize("lenient", ["lora", "shared_critic"])
def test_heads_and_adapters_leave_the_ratio_free(lenient):
    run = replace(
        USUAL, actor=GroupConfig(lr=1e-5, warmup=1), critic=GroupConfig(lr=5e-6, warmup=1)
    )
    assert keys(run) == ["critic.lr"]
    assert keys(replace(run, **{lenient: True})) == []


def test_a_rate_outside_the_wider_bounds_is_told_which_they_are():
    run = replace(USUAL, lora=True, actor=GroupConfig(lr=1e-5, warmup=1))
    run = replace(run, critic=GroupConfig(lr=1e-2, warmup=1))
    [advice] = review(run)
    assert "0.02 to 100 times is what this review lets pass" in str(advice)
    [advice] = review(replace(USUAL, critic=GroupConfig(lr=2e-3, warmup=1)))
    assert "2 to 5 times is usual" in str(advice)


def test_a_large_buffer_may_be_used_more_often():
    run = replace(USUAL, ppo=PPOConfig(num_update_epochs=8))
    assert keys(run) == ["ppo.num_update_epochs"]
    assert keys(replace(run, buffer=BufferConfig(num_prompts=512))) == []


def test_warnings_come_before_notes():
    run = replace(USUAL, actor=GroupConfig(lr=2e-6), sampling=SamplingConfig(top_k=5))
    assert [advice.severity for advice in review(run)] == ["warning", "note"]


def test_text_says_setting_value_reason_and_what_to_try():
    text = advice_text(review(replace(USUAL, ppo=PPOConfig(num_update_epochs=6))))
    assert "`ppo.num_update_epochs` is 6 for a buffer of 64 responses" in text
    assert "Try 2 to 4" in text
    assert "guards.advice" in text


@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
def test_scores_of_usual_spread_fit_the_penalty(std):
    assert review_scores(std, kl_coef=0.05) == []


def test_scores_of_large_spread_make_the_penalty_weak():
    [advice] = review_scores(20.0, kl_coef=0.05)
    # β per unit of spread is 0.05 / 20; the same pull needs 0.05 · 20.
    assert "0.0025" in advice.message
    assert "Try 1," in advice.message
    assert "weak" in advice.message


def test_scores_of_small_spread_make_the_penalty_strong():
    [advice] = review_scores(0.1, kl_coef=0.05)
    assert "as strong as 0.5" in advice.message


@pytest.mark.parametrize("how", ["batch", "running", RewardProcessing(normalize="reference")])
def test_normalised_scores_and_no_penalty_are_left_alone(how):
    assert review_scores(20.0, kl_coef=0.05, normalize=how) == []
    assert review_scores(20.0, kl_coef=0.0) == []
    assert review_scores(float("nan"), kl_coef=0.05) == []


def test_scores_in_units_of_a_given_reference_may_still_have_another_spread():
    def given(std):
        return RewardProcessing(normalize="reference", reference_mean=3.0, reference_std=std)

    assert review_scores(20.0, kl_coef=0.05, normalize=given(20.0)) == []
    [advice] = review_scores(2.0, kl_coef=0.05, normalize=given(20.0))
    # They come out with a spread of 0.1.
    assert "as strong as 0.5" in advice.message
    assert "`reward_processing.reference_std: 2`" in advice.message


def test_constant_scores_are_no_signal():
    [advice] = review_scores(0.0, kl_coef=0.0, normalize="batch")
    assert advice.key == "rewards"
