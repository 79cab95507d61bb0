"""Weights, requests and answers of vLLM."""

from tests.helpers.mutations.base import fault

_TESTS = "unit/rollout/test_vllm_engine.py::"
_WEIGHTS = "unit/rollout/test_vllm_weights.py::"

MUTATIONS = (
    fault(
        "T11",
        "rollout/engines/vllm_requests.py",
        'return "processed_logprobs"',
        'return "raw_logprobs"',
        _TESTS + "test_logprobs_are_the_trainers",
    ),
    fault(
        "T11",  # old weights are another distribution too
        "rollout/engines/vllm_sync.py",
        "self._process.is_empty or held != self._held",
        "self._process.is_empty",
        _WEIGHTS + "test_greedy_it_says_what_the_native_engine_says_before_and_after_updates",
    ),
    fault(
        "T12",
        "rollout/engines/vllm_requests.py",
        '"ignore_eos": True,',
        '"ignore_eos": False,',
        _TESTS + "test_the_folders_own_end_tokens_and_settings_do_not_count",
    ),
    fault(
        "T14",
        "rollout/engines/vllm_requests.py",
        "return ids[:length], True",
        "return ids, True",
        _TESTS + "test_stop_strings_end_where_the_native_engine_ends",
    ),
    fault(
        "T16",
        "rollout/engines/vllm_requests.py",
        '"stop_token_ids": list(stops.end_ids),',
        '"stop_token_ids": list(stops.end_ids[:1]),',
        _TESTS + "test_end_tokens_end_and_belong_to_a_response",
    ),
    fault(
        "T21",  # another cache: prompts read with the weights before
        "rollout/engines/vllm_process.py",
        "if not self._llm.reset_prefix_cache():",
        "if False:",
        _WEIGHTS + "test_prompts_read_with_old_weights_are_read_again",
    ),
    fault(
        "T25",
        "rollout/engines/vllm_sync.py",
        "given.adapter is None:\n            self._lora_request = None\n",
        "given.adapter is None:\n",
        _WEIGHTS + "test_with_its_adapter_off_the_policy_is_its_reference",
    ),
    fault(
        "T25",
        "rollout/engines/vllm_weights.py",
        "total = total + layer.get_delta_weight(name).float()",
        "pass",
        _WEIGHTS + "test_a_refreshed_reference_is_merged",
    ),
    fault(
        "T54",
        "rollout/engines/vllm_weights.py",
        "if key not in cast:",
        "if True:",
        _WEIGHTS + "test_tied_weights_are_written_once_also_in_another_dtype",
    ),
)
