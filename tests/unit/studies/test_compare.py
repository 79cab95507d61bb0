import json
import math

import pytest

from ppo_lightning.studies import (
    BASE,
    Arm,
    State,
    as_json,
    as_markdown,
    as_text,
    compare,
    measure,
    runs_of,
)
from tests.helpers.sweeps import METRIC, write_metrics

DONE = State(status="finished", seconds=10.0, attempts=1)


def arm_of(name):
    return Arm(name=name, settings={} if name == BASE else {"a.x": 1}, config={}, label=name)


def measured(tmp_path, name, golds, *, state=DONE, last=2, metric=METRIC):
    """An arm with a run for each list of gold scores; None where the run has left nothing."""
    arm = arm_of(name)
    found = []
    for run, scores in zip(runs_of(arm, range(len(golds)), tmp_path), golds, strict=True):
        if scores is not None:
            write_metrics(run.folder, scores, kl=float(run.seed))
        found.append(measure(run, state, metric, last))
    return arm, found


def test_a_level_is_the_mean_of_the_last_measurements(tmp_path):
    # Validation every other iteration: the last two measurements are 3 and 5.
    _, [run] = measured(tmp_path, BASE, [[1.0, None, 3.0, None, 5.0, None]])
    assert run.level == 4.0
    assert run.curve == ((0, 1.0), (2, 3.0), (4, 5.0))
    assert run.kl == (4 + 5) / 2  # of the last two iterations
    assert run.problem == ""
    _, [run] = measured(tmp_path, "x", [[1.0]], last=5)
    assert run.level == 1.0


@pytest.mark.parametrize(
    ("golds", "state", "metric", "problem"),
    [
        ([[1.0]], State(status="failed", error="boom"), METRIC, "boom"),
        ([[1.0]], State(status="running"), METRIC, "cut off; the same command goes on with it"),
        ([None], State(), METRIC, "not started"),
        ([[1.0]], DONE, "val/sampled/golf", "did you mean `val/sampled/gold`?"),
        ([[]], DONE, METRIC, "no metrics can be read"),
        ([None], DONE, METRIC, "no metrics can be read"),
    ],
)
def test_a_run_without_a_result_says_why(tmp_path, golds, state, metric, problem):
    _, [run] = measured(tmp_path, BASE, golds, state=state, metric=metric)
    assert problem in run.problem
    assert run.level is None
    assert run.kl is None


def test_a_damaged_file_is_named(tmp_path):
    [run] = runs_of(arm_of(BASE), (0,), tmp_path)
    write_metrics(run.folder, [1.0])
    (run.folder / "metrics.jsonl").write_bytes(b"\x00\n{}\n")
    assert "no metrics can be read: " in measure(run, DONE, METRIC, 1).problem


BASES = [[1.0], [2.0], [4.0]]


def test_differences_are_paired_by_seed(tmp_path):
    # Seeds differ by far more than the arms: unpaired, nothing could be seen.
    base = measured(tmp_path, BASE, BASES)
    better = measured(tmp_path, "better", [[1.1], [2.2], [4.3]])
    table = compare([base, better], METRIC, 2)
    [first, second] = table.rows
    assert first.difference is None
    assert second.difference.mean == pytest.approx(0.2)
    # s = 0.1, s / √3 = 0.057735, t(2) = 4.30265
    assert second.difference.low == pytest.approx(0.2 - 0.248414, abs=1e-5)
    assert second.metric.low < first.metric.mean < second.metric.high
    assert "No arm can be told from the base." in table.notes


def test_a_seed_that_one_arm_lacks_is_in_no_difference(tmp_path):
    base = measured(tmp_path, BASE, BASES)
    arm, runs = measured(tmp_path, "x", [[1.5], [2.5], [4.5]])
    failed = measure(
        runs_of(arm, (1,), tmp_path)[0], State(status="failed", error="boom"), METRIC, 2
    )
    table = compare([base, (arm, [runs[0], failed, runs[2]])], METRIC, 2)
    row = table.rows[1]
    assert (row.metric.num, row.metric.mean) == (2, 3.0)
    assert (row.difference.num, row.difference.mean) == (2, 0.5)
    assert row.problems == ["seed 1: boom"]
    assert "1 of 6 runs are missing in it." in table.notes
    text = as_text(table)
    assert "2 of 3" in text
    assert "- x, seed 1: boom" in text
    assert "Higher than the base: x." in text


def test_one_seed_has_no_intervals_and_it_is_said(tmp_path):
    table = compare(
        [measured(tmp_path, BASE, [[1.0]]), measured(tmp_path, "x", [[2.0]])], METRIC, 2
    )
    assert table.rows[1].difference.mean == 1.0
    assert table.rows[1].difference.low is None
    assert any(note.startswith("One seed: there are no intervals") for note in table.notes)
    assert " to " not in as_text(table).splitlines()[3]


def test_without_a_base_there_are_means_and_no_differences(tmp_path):
    base = measured(tmp_path, BASE, [[1.0]], state=State(status="failed", error="boom"))
    table = compare([base, measured(tmp_path, "x", [[2.0]])], METRIC, 2)
    assert table.rows[1].metric.mean == 2.0
    assert table.rows[1].difference is None


def test_what_is_not_finite_is_shown_and_has_no_interval(tmp_path):
    table = compare(
        [measured(tmp_path, BASE, BASES), measured(tmp_path, "x", [[1.0], [math.nan], [1.0]])],
        METRIC,
        2,
    )
    assert math.isnan(table.rows[1].metric.mean)
    assert "nan" in as_text(table)
    told = as_json(table, {"kind": "sweep", "config": {}})
    assert told["arms"][1]["metric"]["mean"] is None
    json.dumps(told, allow_nan=False)
    assert told["definition"] == {"kind": "sweep"}
    assert told["arms"][0]["runs"][2]["curve"] == [[0, 4.0]]


def test_the_worst_diagnosis_of_the_runs_is_told(tmp_path, monkeypatch):
    arm, runs = measured(tmp_path, BASE, BASES)
    healths = [("healthy", -1), ("critical: kl_runaway since iteration 3", 2), ("ill: x", 1)]
    runs = [
        type(run)(**(vars(run) | {"health": health, "severity": rank}))
        for run, (health, rank) in zip(runs, healths, strict=True)
    ]
    table = compare([(arm, runs)], METRIC, 2)
    assert table.rows[0].health == "critical: kl_runaway since iteration 3 (seed 1)"


def test_a_run_is_diagnosed_by_all_its_iterations(tmp_path):
    [run] = runs_of(arm_of(BASE), (0,), tmp_path)
    write_metrics(run.folder, [1.0] * 12, kl=200.0)  # far above any limit from the start
    found = measure(run, DONE, METRIC, 5)
    assert found.severity >= 0
    assert not found.health.startswith("healthy")


def test_the_table_is_markdown(tmp_path):
    table = compare([measured(tmp_path, "a|b", BASES)], METRIC, 2)
    page = as_markdown("Sweep of x", table)
    lines = page.splitlines()
    assert lines[0] == "# Sweep of x"
    assert lines[2].startswith("| arm")
    assert "a\\|b" in lines[4]
    assert len({len(line) for line in lines[2:5]}) == 1


def test_what_is_told_apart_is_named_and_of_many_a_word_on_chance(tmp_path):
    base = measured(tmp_path, BASE, BASES)
    others = [
        measured(tmp_path, f"x{n}", [[1.0 + shift], [2.0 + shift], [4.0 + shift]])
        for n, shift in enumerate((0.5, -0.5, 1.0))
    ]
    notes = compare([base, *others], METRIC, 2).notes
    assert notes[2:] == ("Higher than the base: x0; x2.", "Lower than the base: x1.")
    more = [measured(tmp_path, f"y{n}", BASES) for n in range(2)]
    assert (
        "chance tells one in twenty apart" in compare([base, *others, *more], METRIC, 2).notes[-1]
    )
