"""Reading a run's log, examining it, and what a page may hold."""

from tests.helpers.mutations.base import fault

_LOAD = "unit/reporting/test_load.py::"
_COLUMNS = "unit/reporting/test_columns.py::"
_EXAMINATION = "unit/reporting/test_examination.py::"
_PAGE = "unit/reporting/test_page.py::"

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
        "T58",  # a response that acts in the reader's browser
        "reporting/page.py",
        "autoescape=True",
        "autoescape=False",
        _PAGE + "test_texts_are_shown_as_they_are",
    ),
)
