"""The sampling temperature, turned while a run goes on."""

from tests.helpers.mutations.base import fault

_RUNS = "integration/test_temperature.py::"
_RANKS = "distributed/test_temperature_ranks.py::"
_COLLECTION = "unit/modules/test_collection.py::"

MUTATIONS = (
    fault(
        "T11",  # the dial turns, and nothing follows
        "modules/ppo.py",
        "sampling=self.sampling_in_force,",
        "sampling=self.sampling,",
        _RUNS + "test_a_request_changes_samples_scores_and_update_alike",
    ),
    fault(
        "T11",
        "modules/collection.py",
        "self._network_scores(sequences, rollout.temperature)",
        "self._network_scores(sequences, self.sampling.temperature)",
        _RUNS + "test_what_is_sampled_ahead_keeps_the_one_that_went_with_the_weights",
    ),
    fault(
        "T11",  # the buffer is said to be of the temperature in force now
        "modules/collection.py",
        "        require_alike_among_peers(rollout.response_ids)\n",
        "        rollout = replace(rollout, temperature=self.sampling.temperature)\n",
        _COLLECTION + "test_t11_what_was_sampled_at_another_temperature_is_scored_and_kept_with_it",
    ),
    fault(
        "T11",
        "modules/collection.py",
        "again = replace(self.sampling, temperature=rollout.temperature)",
        "again = self.sampling",
        _COLLECTION
        + "test_t11_what_is_sampled_again_gets_the_temperature_of_the_buffer_that_it_joins",
    ),
    fault(
        "T11",
        "modules/updater.py",
        "experience, objective = batch.experience, self.objective",
        "objective = self.objective\n"
        '        now = self.controls["temperature"]\n'
        "        experience = replace(batch.experience, temperature=now)",
        _RUNS + "test_a_buffer_sampled_before_a_change_is_updated_at_its_own",
    ),
    fault(
        "T11",  # in the exact KL of the loss alone
        "modules/objective.py",
        "full_kl(output.logits, ref_logits, temperature=batch.temperature)",
        "full_kl(output.logits, ref_logits, temperature=1.0)",
        "unit/modules/test_objective.py::"
        "test_exact_kl_in_the_loss_is_that_of_the_whole_distribution",
    ),
    fault(
        "T11",
        "rollout/engines/asynchronous.py",
        "            sampling=sampling,\n            stops=None",
        "            sampling=SamplingConfig(max_new_tokens=sampling.max_new_tokens),\n"
        "            stops=None",
        "unit/rollout/test_async_engine.py::"
        "test_t11_each_task_is_answered_at_the_temperature_that_came_with_it",
    ),
    fault(
        "T53",
        "rollout/ahead.py",
        'temperature=float(kept["temperature"]),',
        "temperature=1.0,",
        _RUNS + "test_t53_a_run_that_was_turned_resumes_bitwise",
    ),
    fault(
        "T42",
        "modules/collection.py",
        "        _require_one_temperature(self.sampling, prompts.prompt_ids.device)\n",
        "",
        _RANKS + "test_a_request_of_one_rank_alone_ends_all",
    ),
    fault(
        "T11",
        "rollout/engines/vllm_requests.py",
        "    if not rules_tokens_out(sampling):\n",
        "    if sampling.temperature != 1.0 and not rules_tokens_out(sampling):\n",
        "unit/rollout/test_vllm_engine.py::test_one_engine_measures_at_every_temperature",
    ),
    fault(
        "T62",  # what is validated would move with the dial
        "modules/ppo.py",
        "            sampling=self.sampling,\n            max_tokens",
        "            sampling=self.sampling_in_force,\n            max_tokens",
        _RUNS + "test_held_out_prompts_keep_the_configured_one",
    ),
)
