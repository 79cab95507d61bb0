"""What an estimate of the memory counts."""

from tests.helpers.mutations.base import fault

_SHARDING = "unit/estimate/test_sharding.py::"
_TRAFFIC = "unit/estimate/test_traffic.py::"
_PROCESS = "unit/estimate/test_process.py::"

MUTATIONS = (
    fault(
        "T61",  # the second of two blocks is not like those in the middle of a deep model
        "estimate/sketch.py",
        "DEPTHS = (3, 4)",
        "DEPTHS = (2, 3)",
        _SHARDING + "test_few_blocks_tell_it_too_where_the_last_leaves_tokens_out",
    ),
    fault(
        "T61",
        "estimate/memory.py",
        'return MIXED if mixed and stage != "reward" else PLAIN',
        "return MIXED if mixed else PLAIN",
        _PROCESS + "test_what_a_stage_leaves_in_the_heap_follows_from_its_tensors",
    ),
    fault(  # the rollout gathers a block at a time in an estimate, the whole actor in a run
        "T47",
        "estimate/sharding.py",
        "        return sizes.actor.weights\n",
        "        return sizes.actor.block\n",
        _SHARDING + "test_what_is_put_together",
    ),
    fault(
        "T47",
        "estimate/sharding.py",
        "if part in _WEIGHTS:",
        "if part in _WEIGHTS[:2]:",
        _SHARDING + "test_each_strategy_cuts_what_it_says",
    ),
    fault(  # gradients of a whole minibatch, where they are reduced for each microbatch
        "T38",
        "estimate/traffic.py",
        "    passes = steps * work.microbatches\n",
        "    passes = steps\n",
        _TRAFFIC + "test_ddp_adds_gradients_up_for_each_minibatch",
    ),
    fault(
        "T49",
        "estimate/traffic.py",
        "return steps * all_reduce_bytes(gradients, ranks)",
        "return steps * reduce_scatter_bytes(gradients, ranks)",
        _TRAFFIC + "test_ddp_adds_gradients_up_for_each_minibatch",
    ),
    fault(
        "T43",  # GPUs that were asked for would be left out without a word
        "cli/estimate.py",
        '    if given.hardware is not None and run.device == "cpu":\n',
        "    if False:\n",
        "unit/cli/test_estimate.py::test_what_cannot_be_a_cluster_is_named",
    ),
)
