"""Ranks that wait for ever: what notices that another one is gone, stopped, failed or hangs."""

from tests.helpers.mutations.base import fault

_BEATS = "unit/distributed/test_beats.py"
_DEATHS = "distributed/test_watchdog.py"

MUTATIONS = (
    fault(
        "T42",
        "distributed/beats.py",
        'gone = [r for r, s in others.items() if s.gone and s.beat.state == "runs"]',
        "gone: list[int] = []",
        f"{_BEATS}::test_a_process_that_is_gone_is_named_at_once",
    ),
    fault(
        "T42",
        "distributed/beats.py",
        "if len(late) < len(running):",
        "if False:",
        f"{_BEATS}::test_a_slow_rank_that_makes_progress_is_left_alone_however_long_others_wait",
    ),
    fault(
        "T42",
        "distributed/beats.py",
        "if s.beat.idle > timeout}",
        "if s.idle > timeout}",
        f"{_BEATS}::test_silence_is_not_taken_for_a_hang_that_nobody_has_reported",
    ),
    fault(
        "T42",
        "distributed/processes.py",
        "or state[0] in _DEAD or",
        "or",
        "unit/distributed/test_processes.py::"
        "test_a_process_is_there_until_it_ends_also_as_a_zombie",
    ),
    fault(
        "T42",
        "distributed/progress.py",
        "        finally:\n            self.waited += self._clock() - began\n",
        "        finally:\n            self.waited += began\n",
        "unit/distributed/test_progress.py::test_waiting_is_added_up_and_its_end_is_progress",
    ),
    fault(
        "T42",
        "distributed/watch.py",
        "                kill(beat.pid, beat.birth)",
        "                pass",
        f"{_DEATHS}::test_t42_a_stopped_rank_is_named_and_ended_within_the_timeout",
    ),
    fault(
        "T42",
        "modules/watchdog.py",
        "watch.fail(f",
        "str(f",
        f"{_DEATHS}::test_t42_t46_an_error_on_one_rank_is_every_ranks",
    ),
    fault(
        "T42",
        "rewards/scores.py",
        "    pulse.beat()\n",
        "",
        f"{_DEATHS}::test_a_slow_rank_that_gets_on_is_left_alone",
    ),
    fault(
        "T42",
        "modules/run_safety.py",
        "return [*_watchdogs(trainer), StopOnSigterm(), *checkpointing]",
        "return [StopOnSigterm(), *checkpointing]",
        "unit/modules/test_watchdog.py::"
        "test_runs_on_several_ranks_are_watched_unless_the_user_says_how",
    ),
)
