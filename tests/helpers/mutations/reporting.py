"""Reading a run's log, examining it, and what a page may hold."""

from tests.helpers.mutations.base import fault

_LOAD = "unit/reporting/test_load.py::"
_COLUMNS = "unit/reporting/test_columns.py::"
_EXAMINATION = "unit/reporting/test_examination.py::"
_PAGE = "unit/reporting/test_page.py::"
_RULES = "unit/diagnostics/test_own_rules.py::"
_EXAMINER = "unit/diagnostics/test_examiner.py::"

MUTATIONS = (
    fault(
        "T58",  # rows that a resumed run has left behind would be the run's present
        "reporting/load.py",
        "            later = [i for i in self.rows if i > number]\n",
        "            later = []\n",
        _LOAD + "test_a_resumed_run_counts_with_its_later_rows_and_none_of_the_abandoned_ones",
    ),
    fault(
        "T58",
        "reporting/load.py",
        "return sorted(merger.rows.items())",
        "return list(merger.rows.items())",
        _LOAD + "test_rows_out_of_order_are_sorted_and_this_is_said",
    ),
    fault(
        "T59",  # a number that is not finite would be one that was not measured
        "reporting/tables.py",
        "numbers |= dict.fromkeys((str(name) for name in nonfinite), math.nan)",
        "pass",
        _LOAD + "test_what_was_not_finite_is_nan_again",
    ),
    fault(
        "T59",  # KL of a token is not that of a response
        "reporting/columns.py",
        "= per_token * length",
        "= per_token",
        _COLUMNS + "test_a_log_of_openrlhf",
    ),
    fault(
        "T59",
        "reporting/columns.py",
        "yield NAME_OF.get(name, name), value * self.factor",
        "yield NAME_OF.get(name, name), value",
        _COLUMNS + "test_a_log_of_trl",
    ),
    fault(
        "T58",  # what a rollback has undone would be a verdict on the run
        "reporting/examination.py",
        "        if row.iteration in restored:\n",
        "        if False:\n",
        _EXAMINATION + "test_what_a_rollback_undid_is_told_but_is_no_verdict",
    ),
    fault(
        "T61",  # a page that grows with the run
        "reporting/figures.py",
        "    if len(items) <= most:\n",
        "    if True:\n",
        _PAGE + "test_a_long_run_makes_a_small_page",
    ),
    fault(
        "T58",  # a second writer of a run would be a resumed one, and drop the first's rows
        "reporting/events.py",
        "if writer[0] & names), None)",
        "), None)",
        _LOAD + "test_event_files_of_other_writers_stand_beside_each_other",
    ),
    fault(
        "T58",  # some run of several, by its name
        "reporting/load.py",
        'if name == "version" and digits.isdecimal() else None',
        "if digits.isdecimal() else None",
        _LOAD + "test_runs_that_are_no_versions_are_not_chosen_among",
    ),
    fault(
        "T59",  # a share of one response is all of them
        "reporting/columns.py",
        'more.setdefault(NAME_OF["num_responses"], _SOME_RESPONSES)',
        'more.get(NAME_OF["num_responses"], 1.0)',
        _COLUMNS + "test_a_share_of_broken_scores_counts_as_one_also_without_a_number",
    ),
    fault(
        "T58",  # what was undone would stay as bad as it was
        "diagnostics/examiner.py",
        "if stages and len(stages) < len(episode.worsened):",
        "if False:",
        _EXAMINER + "test_an_illness_is_as_bad_as_it_was_where_the_run_went_back_to",
    ),
    fault(
        "T59",  # the mean of two judgements that are no neighbours
        "diagnostics/course.py",
        "set(max(pairs)[1:])",
        "set(max(pairs)[1:2])",
        _EXAMINER + "test_the_best_gold_score_of_a_long_run_is_that_of_two_judgements_in_a_row",
    ),
    fault(
        "T31",  # a rule of the user's own that returns something else
        "diagnostics/own_rules.py",
        "if words and isinstance(found.evidence, tuple) and found.severity in SEVERITIES:",
        "if True:",
        _RULES + "test_one_that_fails_is_named_and_stops_no_other",
    ),
    fault(
        "T53",  # dials that nobody turns back
        "callbacks/doctor.py",
        "        if undone := self.treatment.withdraw_unknown(pl_module.controls):\n",
        "        if undone := ():\n",
        "integration/test_doctor.py::"
        "test_a_doctor_that_only_looks_turns_back_what_one_that_acted_has_turned",
    ),
    fault(
        "T53",  # an illness that comes again after a rollback would be no news
        "callbacks/doctor.py",
        'if d.severity != "watch"}\n',
        "}\n",
        "integration/test_doctor.py::test_what_comes_again_after_a_rollback_is_reported_again",
    ),
    fault(
        "T58",  # a response that makes the reader's browser fetch a picture
        "callbacks/samples.py",
        '_MARKDOWN.sub(lambda sign: f"&#{ord(sign[0])};", html.escape(text))',
        'html.escape(text).replace("|", "&#124;")',
        "unit/callbacks/test_samples.py::test_nothing_of_a_text_acts_where_tensorboard_shows_it",
    ),
    fault(
        "T58",  # a response that acts in the reader's browser
        "reporting/page.py",
        "autoescape=True",
        "autoescape=False",
        _PAGE + "test_texts_are_shown_as_they_are",
    ),
    fault(
        "T59",  # two pictures of a page would share names
        "io.py",
        '(?P<before>\\bid="|',
        "(?P<before>",
        "unit/test_io.py::test_names_in_a_picture_become_its_own",
        "unit/reporting/test_page.py::test_the_page_is_well_formed_with_names_that_are_unique",
        "unit/studies/test_page.py::test_names_in_pictures_are_those_of_one_picture_each",
    ),
)
