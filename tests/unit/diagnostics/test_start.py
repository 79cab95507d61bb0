"""What the first buffer says of the models that a run starts from."""

from dataclasses import replace

import pytest

from ppo_lightning.diagnostics import (
    RewardOrigin,
    Start,
    TextReader,
    advice_text,
    review_reward_origin,
    review_start,
)

RIGHT = Start(
    kl_ref=0.0,
    num_responses=64,
    mean_length=50.0,
    policy="runs/sft",
    policy_fingerprint="aaaaaaaaaa",
    reference="runs/sft",
    reference_fingerprint="aaaaaaaaaa",
)
POLICY = TextReader(
    path="runs/sft", lineage=["sft1", "base"], tokenizer="words", chat_template="chatml"
)
REWARD = RewardOrigin(
    name="rm",
    model=TextReader(path="runs/rm", tokenizer="words", chat_template="chatml"),
    sft_path="runs/sft",
    sft_fingerprint="sft1",
)


@pytest.mark.parametrize(
    ("kl", "length", "said"),
    [(0.0, 50, False), (0.1, 50, False), (0.11, 50, True), (0.2, 1000, False), (0.6, 1000, True)],
)
def test_a_kl_beyond_rounding_is_another_model(kl, length, said):
    assert bool(review_start(replace(RIGHT, kl_ref=kl, mean_length=length))) is said


def test_the_warning_has_the_evidence_and_the_way_out():
    wrong = replace(RIGHT, kl_ref=7.25, policy="gpt2", policy_fingerprint="bbbbbbbbbb")
    (advice,) = review_start(wrong)
    assert advice.severity == "warning"
    text = advice_text([advice])
    assert "`reference.path` is `runs/sft` (weights aaaaaaaa)" in text
    assert "it began as `gpt2` (weights bbbbbbbb)" in text
    assert "7.25 nats per response (64 responses)" in text
    assert "Set `policy.path` to `runs/sft`" in text


def test_a_reference_of_the_actors_own_must_be_at_zero_too():
    (advice,) = review_start(replace(RIGHT, kl_ref=2.0, reference=None))
    assert "does not say the same twice" in advice.message
    assert review_start(replace(RIGHT, reference=None)) == []


def test_a_reward_model_of_the_same_sft_model_is_left_alone():
    assert review_reward_origin(REWARD, POLICY) == []
    later = replace(POLICY, lineage=["ppo1", "sft1", "base"])  # a second round
    assert review_reward_origin(REWARD, later) == []


def test_one_of_another_sft_model_is_named_with_both():
    (advice,) = review_reward_origin(replace(REWARD, sft_fingerprint="sft9999999"), POLICY)
    assert advice.severity == "warning"
    assert advice.key == "rewards[rm].path"
    for part in ("`runs/rm`", "(weights sft99999)", "`runs/sft`", "(weights sft1)"):
        assert part in advice.message


def test_one_of_another_template_is_named():
    other = replace(REWARD, model=replace(REWARD.model, chat_template="brackets"))
    (advice,) = review_reward_origin(other, POLICY)
    assert "of another template (digest brackets)" in advice.message


def test_one_of_another_family_reads_its_own_way():
    foreign = TextReader(path="runs/rm", tokenizer="letters", chat_template="brackets")
    assert review_reward_origin(RewardOrigin(name="rm", model=foreign), POLICY) == []
    untold = replace(REWARD, model=replace(REWARD.model, chat_template=""))
    assert review_reward_origin(untold, POLICY) == []


def test_what_is_unknown_is_not_held_against_it():
    assert review_reward_origin(replace(REWARD, sft_fingerprint=""), POLICY) == []
    assert review_reward_origin(REWARD, replace(POLICY, lineage=[])) == []


def test_a_folder_that_was_changed_since_is_a_note():
    (advice,) = review_reward_origin(replace(REWARD, changed=["weights", "chat template"]), POLICY)
    assert advice.severity == "note"
    assert "weights and chat template" in advice.message
