"""Rewards: what their models read, parts per token, weights that move, constraints, analysis."""

from tests.helpers.mutations.base import fault

_WEIGHTS = "unit/rewards/test_weights.py"
_TOKENS = "unit/rewards/test_token_rewards.py"
_LEARNED = "unit/rewards/test_learned_options.py"
_STATS = "unit/modules/test_reward_stats.py"
_ANALYSIS = "unit/rewards/test_analysis.py"

MUTATIONS = (
    fault(
        "T22",
        "functional/rewards.py",
        "found[mask] = tokens[places < mask.sum(1, keepdim=True)]",
        "found[:, : tokens.shape[1]] = tokens",
        f"{_TOKENS}::test_holes_in_a_response_get_nothing",
    ),
    fault(
        "T23",
        "rewards/learned.py",
        "self._reading = self._with_own(folder_reading(self.path))",
        "self._reading = self._with_own(Reading())",
        f"{_LEARNED}::test_the_folder_says_how_its_model_was_trained",
    ),
    fault(
        "T23",
        "rewards/learned.py",
        "return replace(reading, **{name: v for name, v in own.items() if v is not None})",
        "return replace(reading, **{name: v for name, v in own.items() if v})",
        f"{_LEARNED}::test_the_users_own_settings_come_first",
    ),
    fault(
        "T29",
        "rewards/analysis.py",
        "if x[0] == x[-1]:",
        "if False:",
        f"{_ANALYSIS}::test_a_constant",
    ),
    fault(
        "T31",
        "rewards/scores.py",
        "if not isinstance(values, Sequence) or len(values) != length:",
        "if not isinstance(values, Sequence) or len(values) < length:",
        f"{_TOKENS}::test_rows_of_another_shape_are_named",
    ),
    fault(
        "T31",
        "rewards/scores.py",
        "tokens = tokens.float().masked_fill(~finite[:, None], 0)",
        "tokens = tokens.float()",
        f"{_TOKENS}::test_a_token_that_is_no_number_drops_its_response_or_stops_the_run",
        f"{_TOKENS}::test_watched_ones_reach_nothing",
    ),
    fault(
        "T26",
        "rewards/pipeline.py",
        "weights, multipliers = self.weights_at(iteration), self.multipliers.values",
        "weights, multipliers = self.weights_at(None), self.multipliers.values",
        f"{_WEIGHTS}::test_the_iteration_alone_says_the_weight",
    ),
    fault(
        "T52",
        "rewards/pipeline.py",
        '"multipliers": self.multipliers.state_dict(),',
        '"multipliers": {},',
        f"{_WEIGHTS}::test_it_goes_on_where_it_was",
    ),
    fault(
        "T42",
        "rewards/multipliers.py",
        "masked_moments(table, counted_mask, reduce=reduce)",
        "masked_moments(table, counted_mask)",
        f"{_WEIGHTS}::test_ranks_agree_on_lambda",
    ),
    fault(
        "T26",
        "functional/control.py",
        "gathered = _clip(multiplier.gathered + rate * violation, 0.0, largest)",
        "gathered = multiplier.gathered + rate * violation",
        f"{_WEIGHTS}::test_the_law_by_hand",
    ),
    fault(
        "T26",
        "rewards/pipeline.py",
        "if weights[name] or name in multipliers}",
        "if weights[name]}",
        f"{_WEIGHTS}::test_a_cost_that_is_no_number_is_an_error_or_dropped_whatever_lambda",
    ),
    fault(
        "T29",
        "modules/collection.py",
        "scores, groups = result.totals.to(kept.device), rollout.prompts.groups",
        "scores, groups = result.scores.to(kept.device), rollout.prompts.groups",
        f"{_STATS}::test_comparisons_of_responses_count_rewards_per_token",
    ),
    fault(
        "T42",
        "rewards/analysis.py",
        "return x[x.isfinite()].sort().values",
        "return x[x.isfinite()]",
        f"{_ANALYSIS}::test_the_order_changes_no_bit",
        f"{_ANALYSIS}::test_by_hand",
    ),
    fault(
        "T42",
        "modules/reward_stats.py",
        "together = sorted(responses)",
        "together = responses",
        f"{_STATS}::test_the_same_whoever_holds_which",
    ),
)
