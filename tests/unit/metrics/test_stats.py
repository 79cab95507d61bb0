import dataclasses
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from ppo_lightning.metrics import (
    POSITIONS,
    AnswerStats,
    ComponentStats,
    GroupStats,
    IterationStats,
    PositionStats,
    RewardModelStats,
    RolloutStats,
    RunStats,
    SFTStats,
    StepStats,
    TimeStats,
    UpdateStats,
    metric_specs,
    section_specs,
)
from ppo_lightning.metrics.docs import metrics_markdown
from ppo_lightning.metrics.schema import Aggregation

ROOT = Path(__file__).parents[3]
RECORDS = [RolloutStats, UpdateStats, TimeStats, RunStats, AnswerStats, ComponentStats]
RECORDS += [PositionStats, GroupStats]

# What every iteration has to log; the names are those that users' plots and monitors hold on to.
LOGGED = {
    "rollout": "score_mean score_std score_min score_max raw_score_mean reward_mean kl_ref "
    "kl_ref_per_token entropy sampled_nll response_length_mean response_length_max truncated_share "
    "repeated_bigrams distinct_1 distinct_2 opening_share sampler_mismatch behaviour_kl "
    "explained_variance advantage_std kl_coef temperature entropy_start entropy_relative "
    "score_length_correlation score_repetition_correlation",
    "update": "policy_loss value_loss entropy kl_old clip_fraction clip_active_fraction ratio_mean "
    "clip_fraction_positive clip_fraction_negative ratio_beyond_2 ratio_max "
    "grad_norm_actor grad_norm_critic lr_actor lr_critic steps_taken kl_stopped",
    "time": "rollout reward update rollout_tokens_per_second device_idle_share",
    "run": "iteration optimizer_steps policy_version memory_gib",
}


def full(iteration=0):
    """Every metric measured, each with another number."""
    numbers = iter(range(1, 1000))

    def fill(record):
        return {name: float(next(numbers)) for name in metric_specs(record)}

    return IterationStats(
        **fill(IterationStats) | {"iteration": iteration},
        components={name: ComponentStats(**fill(ComponentStats)) for name in ("len", "rm/v2")},
        entropy_at={name: PositionStats(**fill(PositionStats)) for name in POSITIONS},
        groups={name: GroupStats(**fill(GroupStats)) for name in ("sums", "part_1")},
        val_greedy=AnswerStats(**fill(AnswerStats)),
        val_sampled=AnswerStats(**fill(AnswerStats)),
        val_reference=AnswerStats(**fill(AnswerStats)),
    )


@pytest.mark.parametrize("group", LOGGED)
def test_required_metrics_have_their_names(group):
    names = {spec.name for spec in metric_specs(IterationStats).values()}
    assert {f"{group}/{name}" for name in LOGGED[group].split()} - names == set()


def test_every_name_is_written_once():
    logged = full().to_log()
    times = {IterationStats: 1, AnswerStats: 3, ComponentStats: 2, PositionStats: 16, GroupStats: 2}
    count = sum(many * len(metric_specs(record)) for record, many in times.items())
    assert len(logged) == len(set(logged.values())) == count


def test_names_stand_under_the_prefix_of_their_record():
    for record, prefix in zip(RECORDS[:4], ("rollout", "update", "time", "run"), strict=True):
        names = [spec.name for spec in metric_specs(record).values()]
        assert [name for name in names if not name.startswith(f"{prefix}/")] == []


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_says_what_it_is(record):
    specs = metric_specs(record)
    assert [f.name for f in fields(record)] == list(specs)
    for spec in specs.values():
        assert spec.unit
        assert spec.formula
        assert spec.aggregation in get_args(Aggregation)
        low, high = spec.healthy or (None, None)
        assert None in (low, high) or low <= high
        assert spec.healthy != (None, None)


@pytest.mark.parametrize(
    ("field", "healthy"),
    [
        ("kl_old", (0, 0.02)),
        ("clip_fraction", (0, 0.12)),
        ("kl_ref", (0, 10)),
        ("sampler_mismatch", (0, 0.005)),
        ("explained_variance", (-0.3, 1)),
        ("entropy_relative", (0.5, None)),  # half of it lost is an alarm
        ("ratio_max", None),  # healthy runs reached 22
    ],
)
def test_healthy_ranges(field, healthy):
    assert metric_specs(IterationStats)[field].healthy == healthy


def test_log_comes_back_as_the_same_record():
    assert IterationStats.from_log(full().to_log()) == full()


def test_only_what_was_measured_is_logged():
    stats = IterationStats(iteration=2, kl_ref=0.0, score_mean=math.nan)
    logged = stats.to_log()
    assert set(logged) == {"run/iteration", "rollout/kl_ref", "rollout/score_mean"}
    assert next(iter(logged)) == "run/iteration"
    back = IterationStats.from_log({**logged, "rollout/score_mean": 1.0})
    assert back == replace(stats, score_mean=1.0)


def test_components_and_validation_stand_under_their_names():
    stats = IterationStats(
        iteration=0,
        components={"helpful": ComponentStats(raw=2.0, weighted=0.5)},
        val_sampled=AnswerStats(gold=-1.0),
        val_reference=AnswerStats(score=0.25),
    )
    assert stats.to_log() == {
        "run/iteration": 0,
        "rollout/reward/helpful/raw": 2.0,
        "rollout/reward/helpful/weighted": 0.5,
        "val/sampled/gold": -1.0,
        "val/reference/score": 0.25,
    }


def test_places_and_groups_stand_under_their_names():
    stats = IterationStats(
        iteration=0,
        entropy_at={"0": PositionStats(mean=2.0), "2-3": PositionStats(mean=0.5)},
        groups={"part_0": GroupStats(entropy=1.5, score=-2.0, num_responses=4.0)},
    )
    assert stats.to_log() == {
        "run/iteration": 0,
        "rollout/entropy_at/0/mean": 2.0,
        "rollout/entropy_at/2-3/mean": 0.5,
        "rollout/group/part_0/entropy": 1.5,
        "rollout/group/part_0/score": -2.0,
        "rollout/group/part_0/num_responses": 4.0,
    }
    assert IterationStats.from_log(stats.to_log()) == stats


def test_places_are_named_by_the_first_and_the_last():
    assert POSITIONS[:4] == ("0", "1", "2-3", "4-7")
    assert POSITIONS[-2:] == ("8192-16383", "16384-up")


def test_names_of_others_are_left_out():
    stats = IterationStats.from_log({"run/iteration": 1.0, "mine/metric": 3.0, "rollout/new": 1.0})
    assert stats == IterationStats(iteration=1)


def test_iteration_is_needed_and_whole():
    with pytest.raises(KeyError, match="run/iteration"):
        IterationStats.from_log({"rollout/kl_ref": 1.0})
    assert isinstance(IterationStats.from_log({"run/iteration": 4.0}).iteration, int)


def test_validation_joins_a_frozen_record():
    stats = IterationStats(iteration=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.kl_ref = 1.0  # type: ignore[misc]
    assert replace(stats, val_greedy=AnswerStats(score=1.0)).to_log()["val/greedy/score"] == 1


def test_page_of_metrics_is_current():
    # If it is not: python -m ppo_lightning.metrics.docs > docs/metrics.md
    committed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert committed == metrics_markdown()


def test_page_names_every_metric_and_section():
    page = metrics_markdown()
    for record in (IterationStats, StepStats, SFTStats, RewardModelStats):
        for field, spec in metric_specs(record).items():
            assert f"| `{spec.name}` | `{field}` | {spec.unit} | {spec.aggregation} |" in page
    for spec in section_specs(IterationStats).values():
        assert spec.prefix.format(name="<name>") in page


def test_page_is_a_table_with_as_many_cells_in_every_row():
    rows = [line for line in metrics_markdown().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}
