"""The update, precision, checkpoints and what a Trainer is told."""

from tests.helpers.mutations.base import fault

MUTATIONS = (
    fault(
        "T53",
        "modules/offload.py",
        "        _copy_settings(self.param_groups, self._inner.param_groups)\n",
        "",
        "unit/modules/test_offload.py::test_numbers_are_those_of_the_plain_class",
    ),
    fault(
        "T53",
        "modules/offload.py",
        "            row.parameter.copy_(row.weight, non_blocking=True)\n",
        "",
        "unit/modules/test_offload.py::test_parameters_stay_the_tensors_that_others_hold",
    ),
    fault(
        "T55",
        "models/adapters.py",
        "            weight.copy_(own[name])\n",
        "            own[name].copy_(weight)\n",
        "unit/models/test_quantised_base.py::test_an_export_is_merged_into_the_original_weights",
    ),
    fault(
        "T38",
        "modules/update.py",
        "        backward(terms.loss + touch(idle) if idle else terms.loss)\n",
        "        objective.networks.zero_grad()\n        backward(terms.loss)\n",
        "unit/modules/test_update.py::"
        "test_t38_t39_a_rank_short_of_rows_runs_dummies_that_change_nothing",
    ),
    fault(
        "T39",
        "modules/objective.py",
        "mode=ppo.loss_aggregation, **counts._asdict())",
        "mode=ppo.loss_aggregation)",
        "unit/modules/test_objective.py::test_loss_and_sums_are_those_of_a_loop_over_tokens",
    ),
    fault(
        "T39",
        "modules/update.py",
        "tokens, sequences = (all_reduce_sum(own) / num_replicas()).tolist()",
        "tokens, sequences = all_reduce_sum(own).tolist()",
        "unit/modules/test_update.py::test_t39_averaged_gradients_of_two_ranks_are_those_of_one",
    ),
    fault(
        "T40",
        "rollout/minibatches.py",
        "for g in groups.tensor_split(num_minibatches)]",
        "for g in groups.split(len(groups) // num_minibatches)[:num_minibatches]]",
        "unit/rollout/test_minibatches.py::test_t40_sizes_that_do_not_divide",
    ),
    fault(
        "T41",
        "functional/losses.py",
        "return x if clamp is None else x.clamp(-clamp, clamp)",
        "return x",
        "unit/functional/test_losses.py::test_t41_large_log_ratio_gives_a_bounded_loss",
    ),
    fault(
        "T41",
        "modules/decision.py",
        "bad = (~(terms.loss.isfinite() & terms.sums.isfinite().all())).double()",
        "bad = torch.zeros((), dtype=torch.float64)",
        "unit/modules/test_update.py::test_numbers_that_are_not_finite_come_before_the_kl",
    ),
    fault(
        "T42",
        "modules/decision.py",
        "agreed = torch.cat([all_reduce_sum(torch.stack(added)), sum_over_ranks(bad)[None]])",
        "agreed = torch.stack([*added, bad])",
        "unit/modules/test_update.py::test_t42_the_decision_is_made_on_the_sum_over_ranks",
    ),
    fault(
        "T43",
        "modules/trainer_checks.py",
        'lambda t: t.gradient_clip_val is not None,\n        "set',
        'lambda t: False,\n        "set',
        "unit/modules/test_trainer_checks.py",
    ),
    fault(
        "T44",
        "functional/masking.py",
        "return torch.float64 if x.dtype == torch.float64 else torch.float32",
        "return x.dtype",
        "unit/functional/test_logprobs.py::"
        "test_t44_logprobs_of_bfloat16_are_float32_and_never_above_zero",
        "unit/models/test_scoring.py::test_t44_bfloat16_model_of_50k_ids_gives_float32_logprobs",
    ),
    fault(
        "T44",
        "functional/losses.py",
        "(upcast(logprobs) - upcast(old_logprobs))",
        "(logprobs - old_logprobs)",
        "unit/functional/test_losses.py::test_t44_the_ratio_of_bfloat16_is_made_in_float32",
    ),
    fault(
        "T44",
        "functional/losses.py",
        "    values = upcast(values).masked_fill(padding, 0)\n"
        "    returns = upcast(returns).masked_fill(padding, 0)",
        "    values = values.masked_fill(padding, 0)\n"
        "    returns = returns.masked_fill(padding, 0)",
        "unit/functional/test_losses.py::test_t44_the_error_of_bfloat16_values_is_made_in_float32",
    ),
    fault(
        "T44",
        "functional/rewards.py",
        "    at_last = upcast(scores)\n",
        "    at_last = scores\n",
        "unit/functional/test_rewards.py::test_t44_rewards_of_bfloat16_are_made_in_float32",
    ),
    fault(
        "T44",
        "functional/rewards.py",
        "rewards - kl_coef * upcast(kl)",
        "rewards - kl_coef * kl",
        "unit/functional/test_rewards.py::test_t44_rewards_of_bfloat16_are_made_in_float32",
    ),
    fault(
        "T44",
        "functional/masking.py",
        ".sum(dim=dim, dtype=accumulation_dtype(x))",
        ".sum(dim=dim, dtype=x.dtype if x.is_floating_point() else None)",
        "unit/functional/test_masking.py::test_sums_of_bfloat16_are_made_in_float32",
    ),
    fault(
        "T44",
        "functional/advantages.py",
        "    rewards = upcast(rewards).masked_fill(outside, 0)\n"
        "    values = upcast(values).masked_fill(outside, 0)",
        "    rewards = rewards.masked_fill(outside, 0)\n"
        "    values = values.masked_fill(outside, 0)",
        "unit/functional/test_advantages.py::test_low_precision_is_lifted_to_float32",
    ),
    fault(
        "T44",
        "rollout/experience.py",
        "old_logprobs=networks.logprobs,",
        "old_logprobs=networks.logprobs.bfloat16().to(networks.logprobs.dtype),",
        "integration/test_iteration.py::"
        "test_t44_in_bfloat16_the_first_ratio_is_exactly_one_where_the_batch_is_the_same",
    ),
    fault(
        "T44",  # of a norm's backward pass, which runs inside of autocast
        "models/fused/norms.py",
        "with autocast_off(x.device.type):",
        "if True:",
        "unit/models/test_fused_norms.py::test_mixed_precision_rounds_nothing_in_the_backward_pass",
    ),
    fault(
        "T44",
        "models/fused/norms.py",
        "x.dtype == self.weight.dtype == torch.float32",
        "x.dtype == self.weight.dtype",
        "unit/models/test_fused_norms.py::test_dtypes_are_the_familys",
    ),
    fault(
        "T45",
        "modules/trainer_checks.py",
        'lambda t: str(t.precision) in ("16-mixed", "16-true", "16"),',
        "lambda t: False,",
        "unit/modules/test_trainer_checks.py",
    ),
    fault(
        "T60",
        "functional/logprobs.py",
        "ids), _entropy(logprobs if entropy_grad else logprobs.detach())",
        "ids), -_pick(logprobs if entropy_grad else logprobs.detach(), ids)",
        "unit/functional/test_logprobs.py::"
        "test_logprobs_and_entropy_agree_with_the_single_functions",
    ),
    fault(
        "T60",
        "modules/reporting.py",
        '"entropy": networks.entropy,',
        '"entropy": -networks.logprobs,',
        "unit/modules/test_reporting.py::test_means_over_tokens_weigh_every_token_alike",
    ),
    fault(
        "T51",
        "checkpointing/entry.py",
        '    _require_all(checkpoint["state_dict"], module)\n',
        "",
        "unit/checkpointing/test_entry.py::test_t51_a_missing_critic_is_named",
    ),
    fault(
        "T53",
        "callbacks/reward_per_kl.py",
        'self._best = state_dict["best"]',
        "self._best = None",
        "unit/callbacks/test_reward_per_kl.py::"
        "test_t53_the_window_survives_a_resume_at_any_iteration",
    ),
    fault(
        "T54",
        "models/saving.py",
        "            plain.save_pretrained(work, state_dict=state_dict)\n",
        "            plain.config.tie_word_embeddings = False\n"
        "            plain.save_pretrained(work, state_dict=state_dict)\n",
        "unit/models/test_saving.py::test_t54_tied_weights_save_load_and_move_together",
    ),
    fault(
        "T55",
        "checkpointing/entry.py",
        'checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in frozen}',
        'checkpoint["state_dict"] = dict(weights)',
        "unit/checkpointing/test_entry.py::"
        "test_t55_frozen_weights_stay_out_under_either_of_their_names",
    ),
    fault(
        "T55",
        "checkpointing/entry.py",
        "names = module.named_parameters(remove_duplicate=False)",
        "names = module.named_parameters()",
        "unit/checkpointing/test_entry.py::"
        "test_t55_frozen_weights_stay_out_under_either_of_their_names",
    ),
    fault(
        "T56",
        "checkpointing/entry.py",
        '"complete": complete,',
        '"complete": complete, "module": type(module),',
        "unit/checkpointing/test_entry.py",
    ),
    fault(
        "T52",
        "checkpointing/files.py",
        "open_atomic(path, follow_links=False) as file:",
        'open(path, "wb") as file:',
        "integration/test_interrupts.py::"
        "test_t52_t53_a_run_killed_again_and_again_goes_on_bit_for_bit",
    ),
    fault(
        "T42",
        "modules/interrupts.py",
        "if any_rank(self._asked_at is not None, module.device):",
        "if self._asked_at is not None:",
        "distributed/test_interrupts.py::test_t42_sigterm_ends_all_ranks_at_one_place",
    ),
    fault(
        "T42",
        "modules/checkpoint_files.py",
        "if any_rank(failure is not None, self.strategy.root_device):",
        "if failure is not None:",
        "distributed/test_interrupts.py::test_t42_a_full_disk_ends_all_ranks",
    ),
    fault(
        "T56",
        "checkpointing/reading.py",
        "weights_only=True, mmap=True",
        "weights_only=False, mmap=True",
        "unit/checkpointing/test_find.py::test_t51_t56_t57_what_cannot_be_resumed_is_skipped",
    ),
    fault(
        "T57",
        "checkpointing/find.py",
        'if not entry.get("complete", False):',
        'if "complete" not in entry:',
        "unit/checkpointing/test_find.py::test_t51_t56_t57_what_cannot_be_resumed_is_skipped",
    ),
    fault(
        "T57",
        "modules/trainer_checks.py",
        "    callback._save_on_train_epoch_end = True\n",
        "",
        "unit/modules/test_trainer_checks.py::test_t57_others_save_at_the_end_of_an_iteration",
    ),
    fault(
        "T59",
        "modules/held_out.py",
        '"entropy": (sum(a.entropy * a.num_tokens for a in answers), tokens),',
        '"entropy": (sum(a.entropy for a in answers), count),',
        "unit/modules/test_held_out.py::test_t59_means_over_answers_and_means_over_tokens",
    ),
    fault(
        "T62",
        "modules/trainer_checks.py",
        "        _whole_iteration(trainer)\n",
        "        pass\n",
        "unit/modules/test_trainer_checks.py",
        "integration/test_trainer_flags.py::test_t62_fast_dev_run_is_one_whole_iteration",
    ),
    fault(
        "T62",
        "modules/update_steps.py",
        "self.stop_requested, self.trainer.should_stop = True, False",
        "pass",
        "integration/test_trainer_flags.py::"
        "test_t62_a_run_stopped_inside_an_iteration_ends_it_and_can_be_resumed",
    ),
    fault(
        "T49",
        "modules/update.py",
        "        backward(terms.loss + touch(idle) if idle else terms.loss)\n",
        "        terms.loss.backward()\n",
        "distributed/test_two_ranks.py::test_t40_t49_two_ranks_give_the_result_of_one",
    ),
    fault(
        "T53",
        "modules/controls.py",
        "self._requests = {(request.source, request.dial): request for request in requests}",
        "self._requests = {}",
        "unit/modules/test_controls.py::"
        "test_state_survives_a_resume_and_configured_values_are_those_of_the_new_run",
    ),
    fault(
        "T58",
        "metrics/writer.py",
        "kept = [row for row in rows if row[self.axis] < iteration]",
        "kept = rows",
        "unit/metrics/test_writer.py::test_t58_resumed_run_writes_each_iteration_once",
    ),
    fault(
        "T61",
        "modules/reporting.py",
        "        self._steps: list[tuple[Part, Terms, StepReport]] = []\n",
        '        self._steps = [*getattr(self, "_steps", [])]\n',
        "integration/test_iteration.py::test_t61_nothing_grows_from_iteration_to_iteration",
    ),
)
