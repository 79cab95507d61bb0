"""Doses on dials: within bounds, not too often, and back again."""

import json

import pytest

from ppo_lightning.callbacks import TreatmentConfig
from ppo_lightning.callbacks.treatment import Treatment
from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.diagnostics import Diagnosis, Evidence
from ppo_lightning.diagnostics.rules.learning import (
    BLIND,
    CATCHING_UP,
    DIVERGING,
    HELD_BACK,
    TOO_SLOW,
)
from ppo_lightning.modules.controls import Controls, Request, ppo_dials


def controls(coef=0.1):
    return Controls(ppo_dials(PPOConfig(), KLConfig(coef=coef)))


def ill(illness, iteration=0, form=""):
    evidence = (Evidence(metric="x", now=1.0),)
    return Diagnosis(
        illness=illness, severity="ill", since=0, iteration=iteration, evidence=evidence, form=form
    )


def treat(dials, treatment, *diagnoses, spread=1.0):
    said = []
    for diagnosis in diagnoses:
        dials.iteration = diagnosis.iteration
        said += treatment.dose(dials, diagnosis, spread=spread)
    return said


def test_doses_multiply_and_wait_for_each_other():
    dials, treatment = controls(), Treatment("D", TreatmentConfig(wait=3))
    said = treat(dials, treatment, *(ill("kl_runaway", i) for i in range(4)))
    assert said == [
        *("kl_coef 0.1 → 0.4", "actor_lr_factor 1 → 0.5", "clip_range 0.2 → 0.1"),
        *("kl_coef 0.4 → 1.6", "actor_lr_factor 0.5 → 0.25", "clip_range 0.1 → 0.05"),
    ]
    assert [e["iteration"] for e in dials.journal] == [0, 0, 0, 3, 3, 3]
    assert all("kl_runaway" in e["reason"] for e in dials.journal)


def test_there_are_so_many_doses_and_then_it_is_exhausted():
    config = TreatmentConfig(wait=2, max_doses=2)
    dials, treatment = controls(), Treatment("D", config)
    treat(dials, treatment, *(ill("oscillation", i) for i in range(9)))
    assert dials["actor_lr_factor"] == pytest.approx(0.09)
    assert treatment.is_exhausted(ill("oscillation", 4))
    assert not treatment.is_exhausted(ill("oscillation", 3))  # the last one has not had its time
    assert not treatment.is_exhausted(ill("stalled", 9))


@pytest.mark.parametrize(
    ("illness", "form", "dial", "config", "expected"),
    [
        ("kl_runaway", "", "kl_coef", {"max_kl_coef_factor": 5.0}, 0.5),
        ("stalled", HELD_BACK, "kl_coef", {"max_kl_coef_factor": 5.0}, 0.02),
        ("update_too_large", "", "actor_lr_factor", {"min_actor_lr_factor": 0.04}, 0.04),
        ("stalled", TOO_SLOW, "actor_lr_factor", {"min_actor_lr_factor": 0.04}, 5.0),
        ("critic_failure", DIVERGING, "critic_lr_factor", {"min_critic_lr_factor": 0.3}, 0.3),
        ("critic_failure", CATCHING_UP, "critic_lr_factor", {"min_critic_lr_factor": 0.25}, 2.0),
        ("kl_runaway", "", "clip_range", {"min_clip_range_factor": 0.6}, 0.12),
        ("entropy_collapse", "", "ent_coef", {"max_ent_coef": 0.08}, 0.08),
        ("entropy_collapse", "", "temperature", {"max_temperature_factor": 1.15}, 1.15),
    ],
)
def test_bounds_hold(illness, form, dial, config, expected):
    dials, treatment = controls(), Treatment("D", TreatmentConfig(wait=1, **config))
    treat(dials, treatment, *(ill(illness, i, form) for i in range(3)))
    assert dials[dial] == pytest.approx(expected)


def test_a_first_penalty_is_of_the_scores_spread():
    dials, treatment = controls(coef=0.0), Treatment("D", TreatmentConfig())
    treat(dials, treatment, ill("reward_hacking"), ill("reward_hacking", 3), spread=5.0)
    assert dials["kl_coef"] == pytest.approx(0.5 * 4)


def test_a_penalty_for_scores_of_another_scale_is_scaled_once_and_beyond_the_bounds():
    dials = controls()
    treatment = Treatment("D", TreatmentConfig(max_kl_coef_factor=2.0, undo_after=4))
    treat(dials, treatment, ill("reward_scale"), spread=1000.0)
    assert dials["kl_coef"] == pytest.approx(100.0)
    treat(dials, treatment, ill("reward_scale", 3), spread=500.0)
    assert dials["kl_coef"] == pytest.approx(100.0)
    treat(dials, treatment, ill("kl_runaway", 4))
    assert dials["kl_coef"] == pytest.approx(200.0)
    for dials.iteration, left in ((9, 100.0), (13, 0.1)):  # the second dose had turned nothing
        treatment.review(dials, [])
        assert dials["kl_coef"] == pytest.approx(left)


def test_two_illnesses_share_a_dial():
    dials, treatment = controls(), Treatment("D", TreatmentConfig())
    treat(dials, treatment, ill("kl_runaway"), ill("entropy_collapse"))
    assert dials["kl_coef"] == pytest.approx(0.8)


def test_the_actor_pauses_while_the_critic_learns():
    dials, treatment = controls(), Treatment("D", TreatmentConfig())
    treat(dials, treatment, ill("critic_failure", 5, DIVERGING))
    assert dials["train_actor"] == 0
    dials.iteration = 9
    assert dials["train_actor"] == 0
    dials.iteration = 10
    assert dials["train_actor"] == 1
    blind = controls()
    treat(blind, Treatment("D", TreatmentConfig()), ill("critic_failure", 5, BLIND))
    assert blind["train_actor"] == 1


def test_it_is_turned_back_when_the_cause_is_gone_and_later_after_a_relapse():
    dials, treatment = controls(), Treatment("D", TreatmentConfig(undo_after=4))
    treat(dials, treatment, ill("kl_runaway", 0), ill("entropy_collapse", 2))
    dials.iteration = 4
    undone = ["actor_lr_factor 0.5 → 1", "clip_range 0.1 → 0.2", "kl_coef 0.8 → 0.2"]
    assert treatment.review(dials, []) == {"kl_runaway": undone}  # the other one's stays
    dials.iteration = 9
    assert treatment.review(dials, [ill("entropy_collapse", 6)]) == {}  # the last sign counts
    dials.iteration = 10
    assert [*treatment.review(dials, [ill("entropy_collapse", 6)])] == ["entropy_collapse"]
    assert dials["kl_coef"] == 0.1
    assert dials["ent_coef"] == 0
    treat(dials, treatment, ill("kl_runaway", 20))
    dials.iteration = 27
    assert treatment.review(dials, []) == {}
    dials.iteration = 28
    assert [*treatment.review(dials, [])] == ["kl_runaway"]


def test_doses_are_taken_back_one_by_one():
    dials = controls()
    treatment = Treatment("D", TreatmentConfig(wait=1, undo_after=4))
    treat(dials, treatment, *(ill("kl_runaway", i) for i in range(3)))
    courses = []
    for dials.iteration in range(3, 16):
        treatment.review(dials, [])
        courses.append(round(dials["kl_coef"], 6))
    assert courses == [6.4] * 3 + [1.6] * 4 + [0.4] * 4 + [0.1] * 2


def test_a_dial_that_something_else_turned_is_left_for_this_iteration():
    dials, treatment = controls(), Treatment("D", TreatmentConfig(wait=3))
    treat(dials, treatment, ill("kl_runaway", 0), ill("entropy_collapse", 1))
    treat(dials, treatment, ill("kl_runaway", 3))
    left = treatment.leave(dials, {"kl_coef", "actor_lr_factor", "ent_coef"})
    assert left == ["actor_lr_factor 0.25 → 0.5", "kl_coef 3.2 → 0.8"]
    assert dials["clip_range"] == pytest.approx(0.05)  # of both doses
    assert dials["ent_coef"] == pytest.approx(0.1)  # of an earlier iteration
    assert treatment.leave(dials, {"kl_coef", "actor_lr_factor"}) == []
    assert treat(dials, treatment, ill("kl_runaway", 5)) == []  # the other treatment has its time
    assert treat(dials, treatment, ill("kl_runaway", 6)) != []


def test_a_relapse_while_doses_are_taken_back_is_treated_and_taken_back_later():
    dials = controls()
    treatment = Treatment("D", TreatmentConfig(wait=1, undo_after=4))
    treat(dials, treatment, ill("kl_runaway", 0), ill("kl_runaway", 1))
    dials.iteration = 5
    treatment.review(dials, [])
    assert dials["kl_coef"] == pytest.approx(0.4)
    treat(dials, treatment, ill("kl_runaway", 6))
    assert dials["kl_coef"] == pytest.approx(1.6)
    dials.iteration = 13
    assert treatment.review(dials, []) == {}
    dials.iteration = 14
    assert treatment.review(dials, []) != {}


def test_nothing_is_turned_back_where_that_is_off():
    dials, treatment = controls(), Treatment("D", TreatmentConfig(undo_after=None))
    treat(dials, treatment, ill("kl_runaway"))
    dials.iteration = 999
    assert treatment.review(dials, []) == {}


def test_unknown_and_untreatable_illnesses_are_left():
    dials, treatment = controls(), Treatment("D", TreatmentConfig())
    assert treat(dials, treatment, ill("mine"), ill("reward_scale")) == []
    assert dials.journal == []


def test_a_law_of_a_controller_goes_on_below():
    dials, treatment = controls(), Treatment("D", TreatmentConfig())
    treat(dials, treatment, ill("kl_runaway"))
    dials.request(Request(source="AdaptiveKL", dial="kl_coef", value=1.0))
    assert dials["kl_coef"] == 4.0


def test_a_resumed_treatment_goes_on():
    dials, treatment = controls(), Treatment("D", TreatmentConfig(wait=1, undo_after=4))
    treat(dials, treatment, ill("kl_runaway", 0))
    again = Treatment("D", TreatmentConfig(wait=1, undo_after=4))
    again.load_state_dict(json.loads(json.dumps(treatment.state_dict())))
    treat(dials, again, ill("kl_runaway", 1))
    assert dials["kl_coef"] == pytest.approx(1.6)
    dials.iteration = 5
    again.review(dials, [])
    assert dials["kl_coef"] == pytest.approx(0.4)
    dials.iteration = 9
    again.review(dials, [])
    assert dials["kl_coef"] == 0.1


@pytest.mark.parametrize("changes", [
    {"max_doses": 0}, {"wait": 0}, {"undo_after": 0}, {"max_kl_coef_factor": 0.5},
    {"max_temperature_factor": 0.9},
    {"min_actor_lr_factor": 0.0}, {"min_critic_lr_factor": 2.0}, {"min_clip_range_factor": -1.0},
    {"max_ent_coef": -0.1},
])  # fmt: skip
def test_settings_are_checked(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TreatmentConfig(**changes)
