"""Responses of older weights, and sampling in another process."""

from tests.helpers.mutations.base import fault

_VERSIONS = "unit/rollout/test_versions.py::"
_ENGINE = "unit/rollout/test_async_engine.py::"
_RUNS = "integration/test_asynchronous.py::"

MUTATIONS = (
    fault(
        "T11",  # another distribution: the weights would be those of the sampler over the policy
        "functional/importance.py",
        "upcast(logprobs.detach()) - upcast(sampler_logprobs.detach())",
        "upcast(sampler_logprobs.detach()) - upcast(logprobs.detach())",
        "unit/functional/test_importance.py::test_weights_by_hand",
    ),
    fault(
        "T41",
        "functional/importance.py",
        "ratio.clamp(max=cap)",
        "ratio",
        "unit/functional/test_importance.py",
    ),
    fault(
        "T11",
        "modules/objective.py",
        "        loss = loss * batch.importance_weights.masked_fill("
        "~batch.sequences.response_mask, 0)\n",
        "        pass\n",
        "unit/modules/test_objective.py::test_importance_weights_multiply_the_policy_loss_alone",
    ),
    fault(
        "T11",
        "rollout/versions.py",
        "known, versions, right=True)",
        "known, versions)",
        _VERSIONS + "test_the_lag_counts_updates_that_took_steps_whatever_their_number",
    ),
    fault(
        "T42",
        "rollout/versions.py",
        'config.on_stale == "resample" and any_rank(bool(stale.any())):',
        'config.on_stale == "resample" and bool(stale.any()):',
        _VERSIONS + "test_ranks_sample_again_together",
    ),
    fault(
        "T11",  # the weights change while they are read
        "rollout/engines/async_worker.py",
        "        self.settings.weights.read_into(trained_weights(self.model))\n"
        '        _tell(connection, "taken", task.policy_version)\n',
        '        _tell(connection, "taken", task.policy_version)\n',
        _ENGINE + "test_each_task_is_answered_with_the_weights_that_came_with_it",
    ),
    fault(
        "T44",
        "rollout/engines/async_worker.py",
        "tensor.data = tensor.data.to(settings.dtypes.get(name, tensor.dtype))",
        "pass",
        _ENGINE + "test_it_computes_in_the_dtypes_of_the_trainers_model",
    ),
    fault(
        "T55",
        "rollout/engines/async_worker.py",
        "for name, p in model.named_parameters() if p.requires_grad}",
        "for name, p in model.named_parameters()}",
        _RUNS + "test_with_adapters_the_adapters_alone_are_pushed",
    ),
    fault(
        "T52",
        "rollout/datamodule.py",
        "num_prompts = (self.prompts_ahead if ahead else 0) or self.num_prompts",
        "num_prompts = self.num_prompts",
        _RUNS + "test_resume_is_bitwise_with_a_buffer_under_way",
    ),
    fault(
        "T52",
        "modules/ppo.py",
        '        self.ahead.load_state_dict(entry.get("ahead", {}))\n',
        "",
        _RUNS + "test_resume_is_bitwise_with_a_buffer_under_way",
    ),
    fault(
        "T53",
        "modules/ppo.py",
        '        self.versions.load_state_dict(entry.get("versions", {}))\n',
        "",
        _RUNS + "test_resume_is_bitwise_with_a_buffer_under_way",
    ),
    fault(
        "T42",  # the watchdog would end a run that waits for a large buffer
        "rollout/engines/async_process.py",
        "            pulse.beat()\n",
        "            pass\n",
        _ENGINE + "test_a_trainer_that_waits_for_a_buffer_makes_progress",
    ),
)
