"""What the doctor finds, how bad it says it is, and what it turns."""

from tests.helpers.mutations.base import fault

_RULES = "unit/diagnostics/test_rules.py::"
_RANKS = "distributed/test_doctor_ranks.py::"
_TREATMENT = "unit/callbacks/test_treatment.py::"

MUTATIONS = (
    fault(
        "T59",  # a run that is being lost would only be ill, as another illness accounts for it
        "diagnostics/examiner.py",
        'worst([episode.severity, *borne]) or "watch"',
        "episode.severity",
        "unit/diagnostics/test_examiner.py::test_the_one_that_leads_is_as_bad_as_its_companions",
    ),
    fault(
        "T18",  # answers without tokens would be broken scores
        "diagnostics/rules/numbers.py",
        "    if now.unscored_responses is not None:\n",
        "    if False:\n",
        _RULES + "test_what_is_left_out_by_a_rule_is_no_broken_score",
    ),
    fault(
        "T18",
        "modules/reporting.py",
        "(result.dropped.to(device) & (lengths > 0)).sum()",
        "(~kept).sum()",
        "integration/test_iteration.py::test_t18_a_response_without_tokens_takes_part_in_nothing",
    ),
    fault(
        "T59",  # the reference is another model, and nobody says so
        "diagnostics/rules/sampling.py",
        "if course.now.iteration != 0 or",
        "if True or",
        _RULES + "test_a_kl_before_any_update_is_looked_at",
    ),
    fault(
        "T59",  # a run that samples ahead would be watched for ever
        "diagnostics/rules/sampling.py",
        "if lag and lag > allowed:",
        "if lag:",
        _RULES + "test_the_lag_that_a_run_is_set_up_for_is_no_illness",
    ),
    fault(
        "T59",  # one rank would be waiting for others that there were before a resume
        "diagnostics/rules/sampling.py",
        "    if course.now.waiting_share is None:\n",
        "    if False:\n",
        _RULES + "test_a_run_that_goes_on_with_one_rank_waits_for_nobody",
    ),
    fault(
        "T59",
        "modules/staleness.py",
        "max(config.max_lag, _ahead(engine))",
        "config.max_lag",
        "unit/modules/test_staleness.py::test_the_lag_that_is_allowed",
    ),
    fault(
        "T59",  # noise of a few answers would be an illness
        "diagnostics/rules/policy.py",
        "max(limits.swing, 3 * noise)",
        "limits.swing",
        _RULES + "test_the_noise_of_few_answers_is_no_oscillation",
    ),
    fault(
        "T59",  # passes that were too many once would be blamed for ever
        "diagnostics/rules/policy.py",
        'max(course.values("epochs_done", 16), default=0.0)',
        'max(course.values("epochs_done"), default=0.0)',
        _RULES + "test_an_update_that_went_too_far_is_told_from_many_epochs",
    ),
    fault(
        "T53",  # a run that was to be stopped goes on, as another illness leads
        "callbacks/doctor.py",
        '"critical" in (diagnosis.severity, diagnosis.alone)',
        'diagnosis.severity == "critical"',
        "integration/test_doctor.py::test_it_stops_a_run_for_what_another_illness_accounts_for",
    ),
    fault(
        "T53",  # rates that two callbacks cut in one iteration
        "callbacks/doctor.py",
        "if undone := self.treatment.leave(module.controls, lowered):",
        "if undone := ():",
        "integration/test_doctor.py::test_a_run_that_goes_back_is_treated_once",
    ),
    fault(
        "T42",  # each rank would treat what its own rules see
        "callbacks/doctor.py",
        "        return first\n",
        "        return answers\n",
        _RANKS + "test_t42_a_rule_that_sees_it_on_one_rank_alone_turns_all_dials_or_none",
    ),
    fault(
        "T42",  # a rule that fails on the second rank would be silent for good
        "callbacks/doctor.py",
        "for answer in itertools.chain(*others):",
        "for answer in first:",
        _RANKS + "test_t42_a_rule_that_fails_on_one_rank_alone_is_told_of_once",
    ),
    fault(
        "T53",  # dials stay turned, and nobody says so
        "modules/ppo.py",
        "for line in self.controls.left_over(present):",
        "for line in ():",
        "integration/test_doctor.py::test_a_run_without_a_doctor_says_what_one_has_turned",
    ),
    fault(
        "T53",  # what was asked for before a run without a doctor would stay for ever
        "callbacks/treatment.py",
        "controls.asked_by(self.source) if dial not in known]",
        "controls.asked_by(self.source) if dial in known]",
        "integration/test_doctor.py::test_a_run_without_a_doctor_says_what_one_has_turned",
    ),
    fault(
        "T53",
        "modules/controls.py",
        "r.until is None or r.until > self.iteration]",
        "True]",
        "unit/modules/test_controls.py::test_what_nobody_would_turn_back_is_told",
    ),
    fault(
        "T53",  # a dose that nothing else gives would be lost
        "callbacks/treatment.py",
        "self.given[-1].keys() & {*dials}",
        "{*self.given[-1]}",
        _TREATMENT + "test_a_dial_that_something_else_turned_is_left_for_this_iteration",
    ),
)
