"""Normalisation of scores: single and constant ones, pools, and what is remembered."""

from tests.helpers.mutations.base import fault

_TESTS = "unit/rewards/test_normalizer.py"

MUTATIONS = (
    fault(
        "T29",
        "functional/groups.py",
        "return count, mean + slip, (square - slip.square()).clamp_min(0)",
        "return count, mean, square",
        "unit/functional/test_groups.py::test_t29_a_group_without_spread_is_exactly_zero",
    ),
    fault(
        "T29",
        "rewards/normalizer.py",
        "if self._moments.var == 0:",
        "if False:",
        f"{_TESTS}::test_t29_a_score_that_does_not_count_is_not_divided_by_nothing",
    ),
    fault(
        "T29",
        "rewards/normalizer.py",
        "        self._moments = self._moved(scores, counted_mask, reduce)\n"
        "        if self._moments.var == 0:",
        "        before = self._moments\n"
        "        self._moments = self._moved(scores, counted_mask, reduce)\n"
        '        if how == "running":\n'
        "            return normalise(scores, before)\n"
        "        if self._moments.var == 0:",
        f"{_TESTS}::test_t29_constant_scores_are_exactly_zero_from_the_first_batch_on",
    ),
    fault(
        "T33",
        "functional/groups.py",
        "return scaled.masked_fill(var[groups] == 0, 0)",
        "return scaled",
        "unit/functional/test_groups.py::test_t33_a_group_of_one_is_exactly_zero",
    ),
    fault(
        "T33",
        "functional/groups.py",
        "    divisor = count.clamp_min(1)\n",
        "    divisor = count\n",
        "unit/functional/test_groups.py::test_t33_a_group_of_one_is_exactly_zero",
    ),
    fault(
        "T45",
        "functional/normalize.py",
        "x = values.detach().double().flatten(1)",
        "x = values.detach().flatten(1)",
        f"{_TESTS}::test_t45_scores_beyond_the_range_of_float16_are_summed_in_full",
    ),
    fault(
        "T53",
        "rewards/pipeline.py",
        'self.normalizer.load_state_dict(state.get("normalizer", {}))',
        "self.normalizer.load_state_dict({})",
        f"{_TESTS}::test_t53_a_resumed_run_scores_like_one_that_never_stopped",
    ),
    fault(
        "T59",
        "functional/normalize.py",
        "share, shift = batch.count / count, batch.mean - state.mean",
        "share, shift = 0.5, batch.mean - state.mean",
        f"{_TESTS}::test_t59_unlike_batches_are_pooled_and_not_averaged",
    ),
    fault(
        "T59",
        "rewards/normalizer.py",
        "return running_update(now, scores, counted, reduce=reduce)",
        "return running_update(now, scores, counted)",
        f"{_TESTS}::test_t59_unlike_ranks_are_pooled_and_not_averaged",
    ),
)
