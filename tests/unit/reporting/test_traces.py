"""Labelled runs, from their files to the verdict."""

import csv
import json
from pathlib import Path

import pytest

from ppo_lightning.diagnostics import RULES, Examiner
from ppo_lightning.reporting import NEEDS, examine, load_run
from ppo_lightning.reporting.columns import NAME_OF, PLAIN

TRACES = Path(__file__).parents[1] / "diagnostics" / "traces"
LABELS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in TRACES.glob("*.json")}
SICK = sorted(name for name, label in LABELS.items() if label["label"] == "sick")
HEALTHY = sorted(set(LABELS) - set(SICK))
WITHIN = 8
MOST_VERDICTS = 3


def trace(name):
    return load_run(TRACES / f"{name}.csv")


def verdicts(run):
    found = examine(run, rules=RULES).diagnoses
    return [diagnosis for diagnosis in found if diagnosis.severity != "watch"]


def test_there_are_traces_of_both_kinds():
    assert len(SICK) >= 14
    assert len(HEALTHY) >= 6


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_gets_no_verdict(name):
    assert verdicts(trace(name)) == []


@pytest.mark.parametrize("name", SICK)
def test_the_leading_verdict_of_a_sick_run_is_right(name):
    found = verdicts(trace(name))
    assert found[0].illness in LABELS[name]["accepted"]
    assert len(found) <= MOST_VERDICTS


@pytest.mark.parametrize("name", [n for n in SICK if LABELS[n]["onset_iter"] is not None])
def test_a_fault_is_named_soon_after_it_was_made(name):
    examiner, first = Examiner(), None
    for row in trace(name).rows:
        now = [d for d in examiner.examine(row) if d.severity != "watch"]
        if now and first is None and now[0].illness in LABELS[name]["accepted"]:
            first = row.iteration
    onset = LABELS[name]["onset_iter"]
    assert onset <= first <= onset + WITHIN


def columns_of(group):
    """The columns of a trace that give one of some fields."""
    names = {*group, *(NAME_OF.get(field, field) for field in group)}
    found = {column for column, target in PLAIN.targets.items() if {*target.fields} & names}
    made_of = {"kl_ref": {"kl_ref_per_token"}, "dropped_responses": {"reward_nonfinite_frac"}}
    return found.union(*(made_of.get(field, set()) for field in group))


@pytest.mark.parametrize("name", SICK)
def test_without_what_a_rule_needs_its_illness_is_not_seen_and_this_is_said(name, tmp_path):
    path = TRACES / f"{name}.csv"
    illness = verdicts(load_run(path))[0].illness
    gone = columns_of(NEEDS[illness][0])
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{k: v for k, v in row.items() if k not in gone} for row in csv.DictReader(file)]
    poor = tmp_path / "poor.csv"
    with poor.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    run = load_run(poor)
    assert illness not in {diagnosis.illness for diagnosis in verdicts(run)}
    assert illness in examine(run, rules=RULES).blind


def test_every_rule_has_its_needs_written_down():
    assert NEEDS.keys() == {rule.illness for rule in RULES}
