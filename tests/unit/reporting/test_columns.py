"""Logs of other frameworks are known by their columns, and read in this project's units."""

import json

import pytest

from ppo_lightning.diagnostics import RULES
from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import IterationStats
from ppo_lightning.reporting import MAPS, examine, load_run
from ppo_lightning.reporting.columns import NAME_OF, is_known, own_map, recognise

TRL = {
    "train/objective/kl": 4.0,
    "train/objective/scores": 1.5,
    "train/objective/non_score_reward": -0.2,
    "train/objective/rlhf_reward": 1.3,
    "train/policy/approxkl_avg": 0.01,
    "train/policy/clipfrac_avg": 0.1,
    "train/policy/entropy_avg": 2.0,
    "train/loss/value_avg": 0.25,
    "train/val/ratio": 1.01,
    "train/lr": 3e-6,
    "train/global_step": 5,
}
OPENRLHF = {
    "train/policy_loss": -0.1,
    "train/reward": 0.5,
    "train/return": 0.4,
    "train/response_length": 100.0,
    "train/total_length": 130.0,
    "train/kl": 0.02,
    "train/critic_loss": 0.25,
    "train/ppo_kl": 0.01,
    "train/actor_lr": 1e-6,
    "train/global_step": 5,
}
VERL = {
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/vf_explained_var": 0.3,
    "critic/vf_loss": 0.25,
    "response_length/mean": 100.0,
    "response_length/clip_ratio": 0.05,
    "actor/pg_loss": -0.1,
    "actor/ppo_kl": 0.01,
    "actor/entropy": 0.6,
    "actor/reward_kl_penalty": 0.02,
    "actor/reward_kl_penalty_coeff": 0.001,
}


def read(folder, row):
    path = folder / "log.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return load_run(path)


def test_a_log_of_trl(tmp_path):
    run = read(tmp_path, TRL)
    row = run.rows[0]
    assert row.iteration == 5
    assert (row.kl_ref, row.raw_score_mean, row.score_mean, row.reward_mean) == (4.0, 1.5, 1.5, 1.3)
    assert (row.kl_old, row.entropy, row.ratio_mean) == (0.01, 2.0, 1.01)
    assert row.clip_active_fraction == 0.1
    assert row.clip_fraction is None  # theirs counts fewer tokens: it must not stand for ours
    assert row.value_loss == 0.5  # theirs is half of the squared error
    assert row.kl_coef == pytest.approx(0.05)  # what the penalty took, for each nat
    assert (row.lr_actor, row.lr_critic) == (3e-6, 3e-6)
    assert run.kind == "JSONL, columns of TRL's PPOTrainer"
    assert run.unknown == []


def test_a_log_of_openrlhf(tmp_path):
    run = read(tmp_path, OPENRLHF)
    row = run.rows[0]
    assert row.kl_ref_per_token == 0.02
    assert row.kl_ref == pytest.approx(2.0)  # of a response of 100 tokens
    assert (row.raw_score_mean, row.reward_mean, row.value_loss) == (0.5, 0.4, 0.5)
    assert row.response_length_mean == 100.0
    assert run.unknown == ["train/total_length"]


def test_a_log_of_verl_with_its_rows_wrapped(tmp_path):
    run = read(tmp_path, {"step": 7, "data": VERL})
    row = run.rows[0]
    assert row.iteration == 7
    assert (row.raw_score_mean, row.score_max, row.raw_score_min) == (0.5, 1.0, 0.0)
    assert (row.explained_variance, row.value_loss, row.entropy) == (0.3, 0.5, 0.6)
    assert (row.kl_ref, row.kl_coef, row.truncated_share) == (pytest.approx(2.0), 0.001, 0.05)
    assert any("mean log-ratio" in note for note in run.notes)


def test_a_trainer_state_is_read_by_its_history(tmp_path):
    path = tmp_path / "trainer_state.json"
    history = [{**{k.removeprefix("train/"): v for k, v in TRL.items()}, "step": i} for i in (1, 2)]
    path.write_text(json.dumps({"log_history": history, "epoch": 1.0}), encoding="utf-8")
    run = load_run(path)
    assert [row.iteration for row in run.rows] == [1, 2]
    assert run.rows[0].kl_ref == 4.0


@pytest.mark.parametrize(
    ("columns", "name"), [(TRL, "trl"), (OPENRLHF, "openrlhf"), (VERL, "verl")]
)
def test_a_framework_is_known_by_its_columns_with_and_without_prefix(columns, name):
    assert recognise(columns) is MAPS[name]
    assert recognise([column.removeprefix("train/") for column in columns]) is MAPS[name]


def test_a_single_plain_name_may_be_chance():
    assert recognise(["entropy", "loss"]) is None
    assert recognise(["entropy", "kl_ref"]) is MAPS["plain"]


@pytest.mark.parametrize("name", MAPS)
def test_every_map_leads_to_metrics_of_this_project(name):
    for column, target in MAPS[name].targets.items():
        for field in target.fields:
            assert is_known(NAME_OF.get(field, field)), column
    assert set(MAPS[name].notes) <= set(MAPS[name].targets)
    assert set(MAPS[name].signs) - {"total_length"} <= set(MAPS[name].targets)


def test_counts_are_made_of_plain_columns(tmp_path):
    rows = [
        {"iter": 0, "tokens": 1000, "resp_len_mean": 10.0, "reward_nonfinite_frac": 0.1},
        {"iter": 1, "tokens": 1500, "resp_len_mean": 10.0, "reward_nonfinite_frac": 0.0},
    ]
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({**row, "reward_mean": 1.0, "kl_ref": 0.0}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    first, second = load_run(path).rows
    assert (first.num_responses, first.dropped_responses) == (100.0, 10.0)
    assert (second.num_responses, second.dropped_responses) == (50.0, 0.0)


@pytest.mark.parametrize(("share", "code"), [(0.0, 0), (0.01, 0), (0.1, 3), (0.6, 4)])
def test_a_share_of_broken_scores_counts_as_one_also_without_a_number(tmp_path, share, code):
    row = {"reward_mean": 1.0, "reward_std": 1.0, "kl_ref": 0.0, "reward_nonfinite_frac": share}
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"iter": i, **row}) + "\n" for i in range(3)), "utf-8")
    assert examine(load_run(path), rules=RULES).exit_code == code


def test_a_field_that_is_no_metric_is_refused():
    with pytest.raises(ConfigError, match="is no metric of this project"):
        own_map({"x": "rollout/nothing"}, MAPS["plain"])


def test_names_are_those_of_the_record():
    assert NAME_OF["kl_ref"] == "rollout/kl_ref"
    assert IterationStats.from_log({"run/iteration": 0, NAME_OF["entropy"]: 1.0}).entropy == 1.0
