"""The doctor in a run: it tells, reports, treats, goes on after a resume, forgets the undone."""

import csv
import json
import logging
import math
from dataclasses import replace

import pytest
from lightning.pytorch.loggers import CSVLogger

from ppo_lightning.callbacks import CheckpointRollback, Doctor, TreatmentConfig
from ppo_lightning.configs import GroupConfig
from ppo_lightning.diagnostics import Evidence, Finding, Rule, RuleLimits
from tests.helpers.cli import run_cli, tiny_config, write_config
from tests.helpers.faults import RateSpike
from tests.helpers.runs import data_module, fit, ppo_module


class At(Rule):
    """Sees an illness in some iterations."""

    confirm = 1

    def __init__(self, iterations, *, illness="kl_runaway", severity="ill"):
        self.iterations, self.illness, self.severity = iterations, illness, severity

    def examine(self, course, limits):
        """Look at the number of the iteration alone."""
        if course.now.iteration not in self.iterations:
            return None
        evidence = (Evidence(metric="x", now=1.0),)
        return Finding(severity=self.severity, evidence=evidence)


class Together(Rule):
    """Asks several rules on one illness."""

    confirm = 1

    def __init__(self, rules):
        self.rules, self.illness = rules, rules[0].illness

    def examine(self, course, limits):
        """Say what the first says that says anything."""
        return next(filter(None, (rule.examine(course, limits) for rule in self.rules)), None)


class Broken(Rule):
    """A rule with a mistake in it."""

    illness = "flu"

    def examine(self, course, limits):
        """Divide by zero."""
        return 1 / 0


def went_back_to(states, iteration):
    """Goes back, and says that it was to an iteration."""
    whole = states.go_back

    def go_back(module, verdicts):
        return replace(whole(module, verdicts), iteration=iteration)

    return go_back


BUILT_IN = [
    *("critic_failure", "entropy_collapse", "kl_runaway", "length_exploitation", "stalled"),
    *("no_reward_signal", "nonfinite_update", "oscillation", "over_optimisation", "rank_trouble"),
    *("overfit_buffer", "policy_collapse", "reward_hacking", "reward_nonfinite", "reward_outlier"),
    *("reward_scale", "sampling_mismatch", "stale_rollouts", "update_too_large"),
]


def scripted(iterations, **options):
    """A doctor with one rule of the test's own."""
    rule = {k: options.pop(k) for k in ("illness", "severity") if k in options}
    own = At(iterations, **rule)
    doctor = Doctor(rules=[own], **options)
    doctor.examiner.rules = (own,)
    return doctor


def run(folder, model, *callbacks, epochs=5, ckpt=None, module=None, **options):
    module = module or ppo_module(model)
    recorder = fit(
        folder,
        module,
        data_module(buffer={"num_prompts": 8, "num_minibatches": 2}),
        callbacks=list(callbacks),
        max_epochs=epochs,
        ckpt=ckpt,
        **options,
    )
    return module, recorder.stats


def entries(module, *, dial=None):
    mine = [e for e in module.controls.journal if e["source"] == "Doctor"]
    return [(e["iteration"], e["dial"], e["before"], e["after"]) for e in mine
            if dial is None or e["dial"] == dial]  # fmt: skip


def test_it_tells_once_and_touches_nothing(tiny_llama_dir, tmp_path, caplog):
    doctor = scripted({1, 2}, policy="observe", report="none")
    doctor.examiner.clear_after = 2
    logger = CSVLogger(tmp_path / "log")
    with caplog.at_level(logging.INFO):
        module, _ = run(tmp_path, tiny_llama_dir, doctor, logger=logger)
    told = [record.message for record in caplog.records if record.message.startswith("Doctor")]
    assert [line.split(",")[0] for line in told] == [
        "Doctor: kl_runaway (ill)", "Doctor: kl_runaway is over in iteration 4.",
    ]  # fmt: skip
    assert "try" not in told[0]
    assert entries(module) == [
        (1, "illness kl_runaway", 0.0, 2.0),
        (4, "illness kl_runaway", 2.0, 0.0),
    ]
    log = tmp_path / "log" / "lightning_logs" / "version_0" / "metrics.csv"
    with log.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["doctor/severity"]]
    assert [float(row["doctor/severity"]) for row in rows] == [0.0, 2.0, 2.0, 2.0, 0.0]
    assert [row["doctor/kl_runaway"] for row in rows] == ["", "2.0", "2.0", "2.0", "0.0"]


def test_advice_has_causes_and_values(tiny_llama_dir, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        warming_up = ppo_module(tiny_llama_dir, actor=GroupConfig(lr=2e-3, warmup=100))
        module, stats = run(
            *(tmp_path, tiny_llama_dir, scripted({1}, report="none")), epochs=2, module=warming_up
        )
    (told,) = [r.message for r in caplog.records if r.message.startswith("Doctor: kl_runaway")]
    assert "likely: β too small" in told
    coef = stats[1].kl_coef
    assert f"`kl.coef` {coef:.3g} → {4 * coef:.3g}" in told
    assert stats[1].lr_actor < 1e-3  # in force, in the warm-up
    assert "`actor.lr` 0.002 → 0.001" in told
    assert entries(module, dial="kl_coef") == []


def test_it_acts_and_turns_back(tiny_llama_dir, tmp_path):
    doctor = scripted({1}, policy="act", treatment=TreatmentConfig(undo_after=2))
    module, stats = run(tmp_path, tiny_llama_dir, doctor)
    coef = module.kl.coef
    assert entries(module, dial="kl_coef") == [
        (1, "kl_coef", coef, 4 * coef),
        (3, "kl_coef", 4 * coef, coef),
    ]
    assert [s.kl_coef for s in stats] == [coef, coef, 4 * coef, 4 * coef, coef]


@pytest.mark.parametrize(("severity", "last"), [("critical", 1), ("ill", 3)])
def test_it_stops_a_run_that_is_being_lost(tiny_llama_dir, tmp_path, severity, last):
    doctor = scripted(
        range(1, 9), severity=severity, policy="act", stop_on=["kl_runaway"], report="none",
        treatment=TreatmentConfig(max_doses=1, wait=2),
    )  # fmt: skip
    module, stats = run(tmp_path, tiny_llama_dir, doctor, epochs=6)
    assert [s.iteration for s in stats] == list(range(last + 1))
    assert any(dial == "stop" for _, dial, _, _ in entries(module))


def test_it_stops_a_run_for_what_another_illness_accounts_for(tiny_llama_dir, tmp_path):
    hacked = At(range(1, 6), illness="reward_hacking")
    collapsed = At({2, 3}, illness="policy_collapse", severity="critical")
    doctor = Doctor(policy="act", report="none", rules=[hacked, collapsed],
                    stop_on=["policy_collapse"])  # fmt: skip
    doctor.examiner.rules = (hacked, collapsed)
    _, stats = run(tmp_path, tiny_llama_dir, doctor, epochs=5)
    assert [s.iteration for s in stats] == [0, 1, 2]
    (companion,) = [d for d in doctor.diagnoses if d.companion_of]
    assert (companion.illness, companion.severity) == ("policy_collapse", "watch")


@pytest.mark.parametrize(("report", "rollbacks"), [("ill", 1), ("critical", 0), ("none", 0)])
def test_rollback_goes_back_on_what_it_reports(tiny_llama_dir, tmp_path, report, rollbacks):
    doctor = scripted({2}, illness="reward_hacking", report=report)
    back = CheckpointRollback(illnesses=["reward_hacking"])
    run(tmp_path, tiny_llama_dir, doctor, back)
    assert back.num_rollbacks == rollbacks


def test_an_episode_is_reported_once(tiny_llama_dir, tmp_path):
    heard = []
    doctor = scripted({1, 2, 3}, report="ill")
    doctor.on_diagnosis = lambda trainer, module, verdicts: heard.extend(verdicts)
    run(tmp_path, tiny_llama_dir, doctor)
    assert [(v.illness, v.iteration, v.source) for v in heard] == [("kl_runaway", 1, "Doctor")]


def test_what_a_rollback_undid_is_forgotten(tiny_llama_dir, tmp_path):
    doctor = Doctor(policy="observe", limits=RuleLimits(kl_old=0.02))
    back = CheckpointRollback(illnesses=["update_too_large"])
    module, _ = run(tmp_path, tiny_llama_dir, doctor, back, RateSpike(2, 300.0), epochs=5)
    assert back.num_rollbacks >= 1
    (state, *_) = [e for e in module.controls.journal if e["dial"] == "state"]
    rows = [row.iteration for row in doctor.examiner._rows]
    assert not any(state["after"] < i <= state["before"] for i in rows)


def test_a_run_that_goes_back_is_treated_once(tiny_llama_dir, tmp_path):
    doctor = scripted({1, 4}, severity="critical", policy="act")
    back = CheckpointRollback(illnesses=["kl_runaway"], max_rollbacks=1, kl_coef_factor=3.0)
    module, stats = run(tmp_path, tiny_llama_dir, doctor, back, epochs=4)
    assert back.num_rollbacks == 1
    coef = module.kl.coef
    assert [s.kl_coef for s in stats] == pytest.approx([coef, coef, 12 * coef, 12 * coef])
    assert module.controls["actor_lr_factor"] == pytest.approx(0.1)  # the rollback's alone
    assert module.controls["clip_range"] == module.ppo.clip_range / 2  # no rollback turns it
    lines = next(tmp_path.rglob("metrics.jsonl")).read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines[1:])
    told = [c["dial"] for row in rows for c in row.get("changes", ()) if c["source"] == "Doctor"]
    assert (told.count("actor_lr_factor"), told.count("kl_coef")) == (2, 1)  # one is taken back


def test_what_comes_again_after_a_rollback_is_reported_again(tiny_llama_dir, tmp_path):
    """Suspected before the state that was kept, and critical after it, twice."""
    heard = []
    rules = [At({1}, severity="watch"), At({2, 4}, severity="critical")]
    doctor = Doctor(rules=[Together(rules)], policy="observe")
    back = CheckpointRollback(illnesses=["kl_runaway"], max_rollbacks=5)
    back.states.go_back = went_back_to(back.states, 1)
    doctor.on_diagnosis = lambda trainer, module, verdicts: heard.extend(verdicts)
    run(tmp_path, tiny_llama_dir, doctor, back, epochs=5)
    mine = [v.iteration for v in heard if v.source == "Doctor"]
    assert mine == [2, 4]


def test_a_rule_that_fails_stops_nothing(tiny_llama_dir, tmp_path):
    doctor = Doctor(rules=[Broken(), At({1}, illness="gout")], report="none")
    with pytest.warns(UserWarning, match=r"Doctor: the rule on `flu` \(Broken\) failed") as told:
        module, stats = run(tmp_path, tiny_llama_dir, doctor, epochs=3)
    assert len([w for w in told if "flu" in str(w.message)]) == 1
    assert [s.iteration for s in stats] == [0, 1, 2]
    assert entries(module, dial="illness gout")[0] == (1, "illness gout", 0.0, 2.0)


def test_a_spread_that_is_no_number_is_no_dose(tiny_llama_dir, tmp_path, monkeypatch):
    """The unit of a first β is the level of the spread: one NaN or outlier does not spoil it."""
    from ppo_lightning.diagnostics import Examiner

    doctor = scripted({2}, policy="act", report="none")
    spreads = iter((1.0, 2.0, math.nan, 1.0))
    whole = Examiner.examine

    def examine(self, row):
        return whole(self, replace(row, score_std=next(spreads)))

    monkeypatch.setattr(Examiner, "examine", examine)
    doses = []
    monkeypatch.setattr(doctor.treatment, "dose", lambda *_, spread: doses.append(spread) or [])
    run(tmp_path, tiny_llama_dir, doctor, epochs=4)
    assert doses == [1.5]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_doctor_that_only_looks_turns_back_what_one_that_acted_has_turned(
    tiny_llama_dir, tmp_path
):
    acting = scripted({1}, policy="act", report="none")
    treated, _ = run(tmp_path / "part", tiny_llama_dir, acting, epochs=3)
    assert treated.controls["kl_coef"] > treated.kl.coef
    last = next((tmp_path / "part").rglob("*.ckpt"))
    looking = scripted(set(), policy="observe", illness="gout")
    resumed, stats = run(tmp_path / "rest", tiny_llama_dir, looking, epochs=5, ckpt=last)
    assert [s.kl_coef for s in stats] == [treated.kl.coef] * 2
    assert resumed.controls["actor_lr_factor"] == 1.0
    told = [dial for i, dial, *_ in entries(resumed) if i > 2]
    assert "illness kl_runaway" not in told  # of a rule that is not asked any more


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_without_a_doctor_says_what_one_has_turned(tiny_llama_dir, tmp_path, caplog):
    """The doctor that comes after it knows nothing of what was done, and takes it back as well."""
    acting = scripted({1}, policy="act", report="none")
    treated, _ = run(tmp_path / "a", tiny_llama_dir, acting, epochs=2)
    coef, dials = treated.controls["kl_coef"], treated.controls
    last = next((tmp_path / "a").rglob("*.ckpt"))
    with pytest.warns(UserWarning, match="goes on with what Doctor turned before") as told:
        _, stats = run(tmp_path / "b", tiny_llama_dir, epochs=3, ckpt=last)
    (line,) = [str(w.message) for w in told if "Doctor turned" in str(w.message)]
    assert f"`kl_coef` {treated.kl.coef:.3g} → {coef:.3g}" in line
    assert f"`actor_lr_factor` 1 → {dials['actor_lr_factor']:.3g}" in line
    assert "add the callback Doctor with `policy: observe`" in line
    assert stats[-1].kl_coef == coef
    last = next((tmp_path / "b").rglob("*.ckpt"))
    with caplog.at_level(logging.INFO):
        ours, stats = run(
            *(tmp_path / "c", tiny_llama_dir, scripted(set(), policy="act")), epochs=4, ckpt=last
        )
    assert f"takes back what an earlier one has turned: kl_coef {coef:.3g} →" in caplog.text
    assert stats[-1].kl_coef == ours.kl.coef


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_is_the_same_as_one_that_never_stopped(tiny_llama_dir, tmp_path):
    def doctor():
        return scripted({0, 1, 3}, policy="act", treatment=TreatmentConfig(wait=1, undo_after=2))

    whole, _ = run(tmp_path / "whole", tiny_llama_dir, doctor(), epochs=6)
    run(tmp_path / "part", tiny_llama_dir, doctor(), epochs=3)
    last = next((tmp_path / "part").rglob("*.ckpt"))
    resumed, _ = run(tmp_path / "rest", tiny_llama_dir, doctor(), epochs=6, ckpt=last)
    assert entries(resumed) == entries(whole)
    assert resumed.controls["kl_coef"] == whole.controls["kl_coef"]


def test_the_journal_is_in_the_file_of_metrics(tiny_llama_dir, tmp_path):
    run(tmp_path, tiny_llama_dir, scripted({1}, policy="act"), epochs=2)
    (path,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    changed = {change["dial"] for change in rows[1]["changes"]}
    assert {"illness kl_runaway", "kl_coef", "actor_lr_factor"} <= changed


@pytest.mark.parametrize("options", [
    {"policy": "cure"}, {"report": "watch"}, {"ignore": ["gout"]}, {"stop_on": ["gout"]},
])  # fmt: skip
def test_settings_are_checked(options):
    with pytest.raises(ValueError, match=r"must be one of|gout"):
        Doctor(**options)


def test_all_rules_are_known_here():
    assert {rule.illness for rule in Doctor().examiner.rules} == set(BUILT_IN)
    assert Doctor(ignore=["stalled"]).examiner.rules != Doctor().examiner.rules


class Gout(Rule):
    """A rule of a user's own, as a config names it."""

    confirm = 1

    def __init__(self, joint: str = "toe") -> None:
        self.illness = f"gout_of_the_{joint}"

    def examine(self, course, limits):
        """See it always."""
        return Finding(severity="ill", evidence=(Evidence(metric="uric acid", now=9.0),))


def test_rules_limits_and_treatment_come_from_a_config(
    tiny_llama_dir, tmp_path, monkeypatch, caplog
):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    rules = [{"class_path": f"{__name__}.Gout", "init_args": {"joint": "knee"}}]
    settings = {"policy": "observe", "rules": rules, "limits": {"kl_ref": 3.0},
                "treatment": {"max_doses": 1}, "ignore": ["stalled"]}  # fmt: skip
    doctor = {"class_path": "ppo_lightning.callbacks.Doctor", "init_args": settings}
    config["trainer"]["callbacks"] = [doctor]
    path = write_config(tmp_path / "mine.yaml", config)
    with caplog.at_level(logging.INFO):
        assert run_cli(monkeypatch, "fit", "--config", path) == 0
    assert "Doctor: gout_of_the_knee (ill), since iteration 0: `uric acid` is 9." in caplog.text


def test_the_command_line_brings_one(tiny_llama_dir, tmp_path, monkeypatch):
    config = tiny_config(tiny_llama_dir, tmp_path / "run")
    found = []
    monkeypatch.setattr(Doctor, "on_train_epoch_end", lambda self, *_: found.append(self.policy))
    path = write_config(tmp_path / "mine.yaml", config)
    assert run_cli(monkeypatch, "fit", "--config", path) == 0
    assert set(found) == {"advise"}
