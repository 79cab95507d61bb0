"""Scores, rewards, advantages and values."""

from tests.helpers.mutations.base import fault

MUTATIONS = (
    fault(
        "T22",
        "functional/rewards.py",
        "is_last = places == last_index(mask).unsqueeze(-1)",
        "is_last = (places == mask.shape[-1] - 1).expand(mask.shape)",
        "unit/functional/test_rewards.py::test_t22_score_sits_on_the_last_valid_token",
        "unit/rollout/test_experience.py::test_t22_advantages_and_returns_by_hand",
    ),
    fault(
        "T22",
        "functional/rewards.py",
        "is_last = places == last_index(mask).unsqueeze(-1)",
        "is_last = places == last_index(mask).unsqueeze(-1) + 1",
        "unit/rollout/test_experience.py::test_t22_advantages_and_returns_by_hand",
    ),
    fault(
        "T23",
        "models/reward_model.py",
        "if self.tokenizer.chat_template is None:",
        "if True:",
        "unit/models/test_reward_model.py::test_t23_a_chat_is_rendered_with_the_models_own_template",
    ),
    fault(
        "T24",
        "models/reward_model.py",
        "last = last_index(attention_mask.bool())",
        "last = attention_mask.sum(1) - 1",
        "unit/models/test_reward_model.py::test_t24_the_position_comes_from_the_mask_on_either_side",
    ),
    fault(
        "T25",
        "models/adapters.py",
        "    finally:\n        for layer, flag in zip(layers, before, strict=True):",
        "    except ZeroDivisionError:\n        pass\n    else:\n"
        "        for layer, flag in zip(layers, before, strict=True):",
        "unit/models/test_adapters.py::test_t25_the_switch_is_undone_even_after_an_exception",
    ),
    fault(
        "T26",
        "modules/reporting.py",
        '"kl_ref_per_token": quotient(totals, "kl_ref", "length"),',
        '"kl_ref_per_token": quotient(totals, "kl_ref", "responses"),',
        "unit/modules/test_reporting.py::test_kl_per_response_and_per_token_are_two_numbers",
    ),
    fault(
        "T26",
        "functional/control.py",
        "error = _clip(kl / target - 1, -_MAX_ERROR, _MAX_ERROR)",
        "error = kl / target - 1",
        "unit/functional/test_control.py::test_t26_controller_number",
    ),
    fault(
        "T26",
        "callbacks/adaptive_kl.py",
        "found = measured(stats.kl_ref, stats.num_responses)",
        "found = measured(stats.kl_ref_per_token, stats.num_responses)",
        "unit/callbacks/test_adaptive_kl.py::test_t26_it_reads_the_kl_of_a_response",
    ),
    fault(
        "T26",
        "callbacks/adaptive_kl.py",
        "self._adapted(pl_module.kl.coef, kl=0.0, num_responses=buffer.num_responses)",
        "pass",
        "unit/callbacks/test_adaptive_kl.py::"
        "test_t26_settings_that_do_not_suit_the_run_are_refused",
    ),
    fault(
        "T27",
        "functional/kl.py",
        "return torch.expm1(-x) + x",
        "return torch.expm1(x) - x",
        "unit/functional/test_kl.py::test_t27_value_of_k3_has_the_ratio_the_right_way_up",
    ),
    fault(
        "T27",
        "functional/kl.py",
        "weight = log_weight.clamp(-log_weight_clamp, log_weight_clamp).exp()",
        "weight = 1.0",
        "unit/functional/test_kl.py::test_t27_gradient_of_the_kl_loss_is_that_of_the_exact_kl",
    ),
    fault(
        "T28",
        "functional/rewards.py",
        "    rewards = rewards.masked_fill(~response_mask, 0)\n",
        "",
        "unit/functional/test_rewards.py::"
        "test_t28_no_penalty_on_tokens_that_the_policy_did_not_write",
    ),
    fault(
        "T29",
        "functional/normalize.py",
        "scaled = (scores.double() - moments.mean) / (math.sqrt(moments.var) + eps)",
        "scaled = (scores.double() - moments.mean) / torch.tensor(moments.var).sqrt()",
        "unit/functional/test_normalize.py::test_t29_constant_scores_become_exactly_zero",
    ),
    fault(
        "T31",
        "rewards/scores.py",
        "if shape not in ([count], [count, 1]):",
        "if False:",
        "unit/rewards/test_scores.py::test_answers_that_are_not_three_scores",
    ),
    fault(
        "T32",
        "functional/normalize.py",
        "    _, mean, var = masked_moments(values.unsqueeze(0), mask, reduce=reduce)\n"
        "    scaled = (values.double() - mean)",
        "    _, mean, var = masked_moments(\n"
        "        values.nan_to_num().unsqueeze(0), torch.ones_like(mask), reduce=reduce\n"
        "    )\n"
        "    scaled = (values.double() - mean)",
        "unit/functional/test_normalize.py::test_t32_padding_takes_no_part_in_whitening",
    ),
    fault(
        "T32",
        "rollout/experience.py",
        "whiten(raw, mask, reduce=reduce, shift_mean",
        "whiten(raw, mask, shift_mean",
        "unit/rollout/test_experience.py::test_t32_whitening_has_one_mean_over_the_ranks",
    ),
    fault(
        "T33",
        "functional/normalize.py",
        "return count, mean + slip, (square - slip.square()).clamp_min(0)",
        "return count, mean + slip, (square - slip.square()) * count / (count - 1)",
        "unit/functional/test_normalize.py::test_t33_a_single_number_normalises_to_zero",
        "unit/rollout/test_experience.py::test_t33_one_response_of_one_token_is_finite",
    ),
    fault(
        "T34",
        "rollout/experience.py",
        "bootstrap = networks.final_values.masked_fill(~rollout.truncated, 0)",
        "bootstrap = networks.final_values",
        "unit/rollout/test_experience.py::"
        "test_t34_values_after_the_cut_count_where_the_config_says_and_a_response_was_cut",
    ),
    fault(
        "T35",
        "functional/advantages.py",
        "values = upcast(values).masked_fill(outside, 0)",
        "values = upcast(values)",
        "unit/functional/test_advantages.py::test_t35_critic_output_at_padding_is_never_read",
    ),
    fault(
        "T35",
        "models/layout.py",
        "empty = values.new_zeros(rows * width",
        "empty = values.new_ones(rows * width",
        "unit/models/test_scoring.py::test_t35_outputs_under_padding_are_zero_and_send_no_gradient",
    ),
    fault(
        "T36",
        "functional/losses.py",
        "return ValueTerms(torch.where(clipped, bounded, plain), clipped)",
        "return ValueTerms(torch.minimum(bounded, plain), clipped)",
        "unit/functional/test_losses.py::test_t36_value_clipping",
    ),
    fault(
        "T37",
        "models/value_network.py",
        "head.weight, head.bias = linear.weight, linear.bias",
        "head.bias = linear.bias",
        "unit/models/test_value_network.py::"
        "test_t37_a_critic_from_a_reward_model_values_the_end_at_its_score",
    ),
    fault(
        "T37",
        "models/value_network.py",
        "nn.init.zeros_(self.weight)",
        "nn.init.normal_(self.weight)",
        "unit/models/test_value_network.py::test_t37_a_new_head_starts_at_zero_or_small",
    ),
)
