"""What is said of a run: verdict, spells, what a rollback undid, text and JSON."""

import json
import math

import pytest

from ppo_lightning.diagnostics import RULES, RuleLimits
from ppo_lightning.reporting import (
    examine,
    load_run,
    report_record,
    report_text,
    timeline,
)
from ppo_lightning.reporting.timeline import thinned
from tests.helpers.report_runs import change, far_row, healthy_row, runaway_row, write_metrics


def examined(folder, rows, changes=None, **options):
    write_metrics(folder, rows, changes)
    return examine(load_run(folder), rules=RULES, **options)


@pytest.fixture
def runaway(tmp_path):
    rows = [runaway_row(i, since=10) for i in range(30)]
    changes = {20: [change(20, "kl_coef", 0.0005, 0.002, reason="too far")]}
    return examined(tmp_path, rows, changes)


def test_a_healthy_run(tmp_path):
    found = examined(tmp_path, [healthy_row(i) for i in range(20)])
    assert (found.severity, found.exit_code, list(found.diagnoses)) == (None, 0, [])
    assert report_text(found).startswith("healthy\n")
    assert report_record(found)["severity"] == "healthy"


def test_something_to_watch_is_no_failure(tmp_path):
    rows = [healthy_row(i, clip_fraction=0.25) for i in range(10)]
    found = examined(tmp_path, rows)
    assert (found.severity, found.exit_code) == ("watch", 0)
    assert "WATCH update_too_large" in report_text(found)


def test_critical_is_worse_than_ill(tmp_path):
    rows = [healthy_row(i, kl_ref=math.nan if i > 5 else 1.0) for i in range(8)]
    found = examined(tmp_path, rows)
    assert (found.severity, found.exit_code) == ("critical", 4)


def test_thresholds_and_ignored_illnesses_hold(tmp_path):
    rows = [healthy_row(i, clip_fraction=0.25) for i in range(10)]
    found = examined(tmp_path, rows, limits=RuleLimits(clip_watch=0.3))
    assert found.severity is None
    assert examine(found.run, rules=RULES, ignored=["update_too_large"]).severity is None
    assert examine(found.run, rules=RULES).severity == "watch"


def test_the_text_names_evidence_causes_and_remedies_with_the_runs_own_values(runaway):
    text = report_text(runaway)
    assert text.splitlines()[0].startswith("ill: ")
    assert "since iteration" in text
    assert "`rollout/kl_ref` went from 0 to" in text
    assert "likely: " in text
    assert "source: " in text
    card = next(d for d in runaway.diagnoses if d.severity != "watch")
    assert card.illness in text
    assert "   20  AdaptiveKL: kl_coef 0.0005 → 0.002: too far" in text
    assert "not measured: " in text
    assert "rank_trouble" in text


def test_remedies_carry_the_values_in_force_when_the_illness_was_last_seen(tmp_path):
    rows = [healthy_row(i, kl_old=0.3 if i == 5 else 0.01) for i in range(8)]
    rows = [*rows[:5], healthy_row(5, kl_old=0.3, clip_fraction=0.6, lr_actor=4e-3), *rows[6:]]
    text = report_text(examined(tmp_path, rows))
    assert "`actor.lr` 0.004 → 0.0004" in text


def test_rates_in_remedies_are_those_of_the_config_and_not_of_a_warm_up(tmp_path):
    rates = [{"lr_actor": 1e-6 * min(i + 1, 4), "lr_critic": math.nan} for i in range(8)]
    rows = [(healthy_row if i else far_row)(i, **rates[i]) for i in range(8)]
    text = report_text(examined(tmp_path, rows))
    assert "`actor.lr` 4e-06 → 4e-07" in text


def test_an_illness_that_has_passed_is_told_with_its_end(tmp_path):
    rows = [healthy_row(i, kl_coef=0.0, kl_ref=9.0 if 4 < i < 9 else 1.0) for i in range(30)]
    found = examined(tmp_path, rows)
    diagnosis = next(d for d in found.diagnoses if d.illness == "kl_runaway")
    until = diagnosis.until
    assert until is not None
    assert f"over since {until}" in report_text(found).splitlines()[0]
    ends = [h for h in timeline(found) if h.kind == "end" and h.what == "kl_runaway"]
    assert [h.iteration for h in ends] == [until]


def test_what_a_rollback_undid_is_told_but_is_no_verdict(tmp_path):
    rows = [(far_row if i == 6 else healthy_row)(i) for i in range(20)]
    undo = {6: [change(6, "state", 6.0, 5.0, source="CheckpointRollback", reason="undone")]}
    found = examined(tmp_path, rows, undo)
    assert found.severity is None
    spell = next(s for s in found.spells if s.episode.illness == "update_too_large")
    assert (spell.undone_in, spell.last) == (6, 6)
    assert "update_too_large is undone by the rollback" in report_text(found)
    sick = examine(load_run(tmp_path), rules=RULES)
    assert sick.severity is None
    write_metrics(tmp_path / "other", rows)
    assert examine(load_run(tmp_path / "other"), rules=RULES).severity == "critical"


def test_what_a_rollback_undid_of_an_illness_that_stays_is_told(tmp_path):
    rows = [(far_row if i == 6 else healthy_row)(i) for i in range(20)]
    rows[5] = healthy_row(5, clip_fraction=0.25)
    undo = {6: [change(6, "state", 6.0, 5.0, source="CheckpointRollback")]}
    found = examined(tmp_path, rows, undo)
    assert found.exit_code == 0
    told = [(s.episode.severity, s.episode.since, s.undone_in) for s in found.spells]
    assert sorted(told, key=str) == [("critical", 5, 6), ("watch", 5, None)]


@pytest.mark.parametrize("after", [math.nan, math.inf])
def test_a_rollback_to_nowhere_is_none(tmp_path, after):
    path = write_metrics(tmp_path, [healthy_row(i) for i in range(3)])
    lines = path.read_text(encoding="utf-8").splitlines()
    entry = {"iteration": 1, "dial": "state", "before": 1, "after": after}
    lines[2] = json.dumps({**json.loads(lines[2]), "changes": [entry]})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert examine(load_run(tmp_path), rules=RULES).exit_code == 0


def test_an_illness_that_comes_and_goes_fills_no_screen(tmp_path):
    rows = [healthy_row(i, clip_fraction=0.25 if i % 6 == 0 else 0.05) for i in range(600)]
    found = examined(tmp_path, rows)
    assert len(found.spells) == 100
    assert len(thinned(timeline(found), 20)) == 20
    assert len(report_text(found).splitlines()) < 60
    assert len(report_record(found)["episodes"]) == 100


def test_what_the_doctor_noted_is_told_where_it_is_not_seen_here(tmp_path):
    rows = [healthy_row(i, clip_fraction=0.25) for i in range(6)]
    notes = {
        3: [change(3, "illness update_too_large", 0.0, 1.0, source="Doctor")],
        4: [change(4, "illness of_my_own", 0.0, 3.0, source="Doctor", reason="so")],
        5: [change(5, "illness of_my_own", 3.0, 0.0, source="Doctor")],
    }
    found = examined(tmp_path, rows, notes)
    told = [h.text for h in timeline(found) if h.kind == "action"]
    assert told == ["Doctor: of_my_own critical: so", "Doctor: of_my_own over"]
    assert len(report_record(found)["changes"]) == 3


def test_a_law_that_acts_all_the_time_does_not_hide_the_rest(tmp_path):
    rows = [runaway_row(i, since=10) for i in range(60)]
    changes = {i: [change(i, "kl_coef", 0.1, 0.1 + i)] for i in range(60)}
    found = examined(tmp_path, rows, changes)
    happened = timeline(found)
    shown = thinned(happened, 20)
    assert len(shown) <= 20
    assert [h for h in shown if h.kind != "action"] == [h for h in happened if h.kind != "action"]
    assert shown == sorted(shown, key=lambda h: h.iteration)
    assert "more: `--json` has all" in report_text(found)


def test_one_iteration_says_what_could_not_be_judged(tmp_path):
    text = report_text(examined(tmp_path, [healthy_row(0)]))
    assert "there is one iteration" in text


def test_the_record_is_json_with_nothing_that_json_does_not_know(tmp_path):
    rows = [healthy_row(i, kl_ref=math.inf if i == 7 else 1.0) for i in range(9)]
    record = report_record(examined(tmp_path, rows))
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again["version"] == 1
    assert again["exit_code"] == 4
    first = again["diagnoses"][0]
    assert first["illness"] == "nonfinite_update"
    assert first["evidence"][0]["metric"] == "rollout/kl_ref"
    assert first["evidence"][0]["now"] is None
    assert first["remedies"][0].keys() == {"key", "text", "now", "factor", "value"}
    assert again["run"]["iterations"] == 9
    assert "rank_trouble" in again["not_judged"]
    assert again["limits"]["kl_ref"] == 5.0
