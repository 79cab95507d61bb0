"""Sweeps: what is run, how it goes on, and what is compared."""

from tests.helpers.mutations.base import fault

_VALUES = "unit/studies/test_values.py::"
_RUNS = "unit/studies/test_runs.py::"
_PROCESSES = "unit/studies/test_processes.py::"
_COMPARE = "unit/studies/test_compare.py::"
_INTERVALS = "unit/studies/test_intervals.py::"
_SEARCH = "unit/studies/test_search.py::TestWithOptuna::"

MUTATIONS = (
    fault(
        "T01",
        "studies/values.py",
        'get_loader("yaml")(f"[{values}]")',
        'yaml.safe_load(f"[{values}]")',
        _VALUES + "test_values_are_yaml",
    ),
    fault(
        "T52",
        "studies/processes.py",
        "newest_good([run.folder]).path if again else None",
        "None",
        _PROCESSES + "test_a_run_that_was_begun_goes_on_from_its_last_checkpoint",
    ),
    fault(
        "T52",
        "studies/runs.py",
        "again = before.attempts > 0",
        'again = before.status == "failed"',
        "unit/cli/test_sweep.py::test_what_is_done_when_it_is_stopped_is_shown_and_kept",
    ),
    fault(  # every run draws the same numbers as the first
        "T52",
        "studies/runs.py",
        'placed["seed_everything"] = seed',
        'placed.setdefault("seed_everything", seed)',
        _RUNS + "test_a_run_writes_into_its_own_folder_with_its_own_seed",
    ),
    fault(  # the ranks of a killed run would wait, and keep their devices
        "T42",
        "studies/processes.py",
        "            if code < 0:\n",
        "            if False:\n",
        _PROCESSES + "test_what_a_killed_run_has_started_does_not_outlive_it",
    ),
    fault(
        "T61",
        "cli/sweep_work.py",
        "                self._done[run.folder] = found\n",
        "                pass\n",
        "unit/cli/test_sweep.py::test_a_finished_run_is_read_once",
    ),
    fault(  # a run that outlives a killed sweep, and a second one in the same folder
        "T02",
        "studies/processes.py",
        "pass_fds=self.keep_open,",
        "pass_fds=(),",
        _PROCESSES + "test_a_run_holds_the_lock_of_its_sweep",
    ),
    fault(
        "T59",
        "studies/compare.py",
        "levels[seed] - base[seed] for seed in levels if seed in base",
        "levels[seed] - fmean(base.values()) for seed in levels if base",
        _COMPARE + "test_differences_are_paired_by_seed",
    ),
    fault(
        "T59",
        "studies/compare.py",
        "tail = [value for _, value in curve[-last:]]",
        "tail = [value for number, value in curve if number >= len(logged) - last]",
        _COMPARE + "test_a_level_is_the_mean_of_the_last_measurements",
    ),
    fault(
        "T59",
        "studies/intervals.py",
        "(1 + confidence) / 2, len(values) - 1)",
        "(1 + confidence) / 2, len(values))",
        _INTERVALS + "test_an_interval_by_hand",
    ),
    fault(  # the first trials come again and again
        "T53",
        "studies/search.py",
        "TPESampler(seed=self.seed + number)",
        "TPESampler(seed=self.seed)",
        _SEARCH + "test_a_search_that_was_cut_off_is_the_one_that_was_not",
    ),
)
