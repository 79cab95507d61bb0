"""Answers of a reward server that are no rewards, and requests that never end."""

from tests.helpers.mutations.base import fault

_CLIENT, _CONNECTIONS, _HTTP, _CONTRACT = (
    f"rewards/{name}.py" for name in ("http_client", "http_connections", "http", "contract")
)
_TESTS = "unit/rewards/test_http.py"
_ERRORS = f"{_TESTS}::test_t30_answers_without_scores_are_errors_with_everything_named"
_NO_NUMBER = f"{_TESTS}::test_t30_an_entry_that_is_no_number_is_an_error_with_its_sample"
_MISSING = f"{_TESTS}::test_t30_an_entry_that_is_no_number_can_be_missing"
_DROPPED = f"{_TESTS}::test_t30_missing_scores_are_dropped_and_counted_never_zero"
_DRIP = f"{_TESTS}::test_a_slow_drip_does_not_defeat_the_deadline"
_WRONG_SETTING = f"{_TESTS}::test_a_wrong_page_or_token_is_an_error_always_and_never_tried_again"

MUTATIONS = (
    # Scores are read whatever the status says.
    fault("T30", _CLIENT, "            if status != 200:\n", "            if False:\n", _ERRORS),
    # One score is taken for two texts.
    fault("T30", _CONTRACT, "    if len(scores) != count:\n", "    if not scores:\n", _ERRORS),
    # null, "nan" and text become numbers.
    fault(
        "T30",
        _CONTRACT,
        "    if type(entry) not in (int, float):\n",
        "    if entry is None:\n"
        "        return 0.0\n"
        "    if not isinstance(entry, int | float | str):\n",
        _NO_NUMBER,
    ),
    fault(
        "T30",
        _CONTRACT,
        "    if type(entry) not in (int, float):\n",
        "    if not isinstance(entry, int | float):\n",  # true is 1
        _NO_NUMBER,
    ),
    fault("T30", _CONTRACT, "parse_constant=NoNumber", "parse_constant=float", _NO_NUMBER),
    # What is missing counts as 0.
    fault(
        "T30",
        _HTTP,
        "scores.append(math.nan if isinstance(entry, NoNumber) else entry)",
        "scores.append(0.0 if isinstance(entry, NoNumber) else entry)",
        _MISSING,
    ),
    fault(
        "T30",
        _HTTP,
        "problems.append(self._error(*told))\n                scores += [math.nan]",
        "problems.append(self._error(*told))\n                scores += [0.0]",
        _DROPPED,
    ),
    # A failure goes unsaid.
    fault(
        "T30",
        _HTTP,
        'if problems and self.on_failure == "error":',
        "if False:",
        _ERRORS,
    ),
    # Neither the sample nor the server is named.
    fault(
        "T30",
        _HTTP,
        'return RewardError(" ".join(part for part in parts if part), sample=sample)',
        'return RewardError(" ".join(part for part in parts if part))',
        _ERRORS,
    ),
    fault("T30", _HTTP, "`{without_secrets(self.url)}` ", "", _ERRORS),
    # Each read has time anew.
    fault(
        "T30",
        _CONNECTIONS,
        "return await asyncio.wait_for(self._send(client, method, url, body), seconds)",
        "return await self._send(client, method, url, body)",
        _DRIP,
    ),
    # A wrong token is tried again, or drops every response for ever.
    fault(
        "T30",
        _CLIENT,
        "again = status in self.settings.retry_on\n",
        "again = status >= 400\n",
        _WRONG_SETTING,
    ),
    fault(
        "T30",
        _CLIENT,
        "_PERMANENT = (401, 403, 404, 405)",
        "_PERMANENT = ()",
        _WRONG_SETTING,
    ),
    # The order is that of the answers.
    fault(
        "T30",
        _CLIENT,
        "outcome = results[i] = await self._ask(request, retries)",
        "outcome = await self._ask(request, retries)\n"
        "                results[sum(r is not None for r in results)] = outcome",
        f"{_TESTS}::test_batches_are_split_and_put_together_with_32_in_flight",
    ),
    # The server: one bad item takes its neighbours with it.
    fault(
        "T30",
        "rewards/batching.py",
        "            if len(batch) == 1:\n"
        "                batch[0][0].fail(error)\n"
        "                return\n"
        "            for one in batch:\n"
        "                await self._score_batch([one])\n",
        "            for job, _ in batch:\n                job.fail(error)\n",
        "unit/rewards/test_batching.py::test_one_bad_item_fails_its_own_request_alone",
    ),
    # Ids that were not sent are taken for none at all.
    fault(
        "T30",
        "rewards/batching.py",
        "return [_NotSent(field) if row is None else row for row in rows]",
        "return [[] if row is None else row for row in rows]",
        "unit/rewards/test_batching.py::test_ids_that_were_not_sent_are_not_taken_for_none",
    ),
    # A thread does not wait for the server that another one waits for.
    fault(
        "T30",
        _HTTP,
        "with self._setting_up:",
        "if True:",
        "unit/rewards/test_http_life.py::"
        "test_several_threads_may_set_up_and_all_wait_for_the_server",
    ),
)
