"""Gradients in shared memory: who waits for whom, and what is done where they cannot be shared."""

from tests.helpers.mutations.base import fault

_RANKS = "distributed/test_shared_gradients.py"
_MEANS = f"{_RANKS}::test_means_are_those_of_ddp_and_the_same_on_all_ranks"

MUTATIONS = (
    fault(
        "T49",
        "distributed/shared_mean.py",
        "        torch.div(total, 2 + len(others), out=first)",
        "        torch.div(total, 2, out=first)",
        _MEANS,
    ),
    fault(
        "T49",
        "distributed/shared_mean.py",
        "        second.copy_(first)\n",
        "",
        _MEANS,
    ),
    fault(
        "T49",
        "distributed/shared_mean.py",
        "number=rank(), shares=world_size()",
        "number=0, shares=world_size()",
        _MEANS,
    ),
    fault(
        "T49",
        "distributed/shared_mean.py",
        "        if is_first:",
        "        if False:",
        f"{_RANKS}::test_a_backward_pass_that_failed_leaves_nothing_to_the_next",
    ),
    fault(
        "T49",
        "distributed/shared_mean.py",
        "bucket.div_(world_size())",
        "bucket",
        f"{_RANKS}::test_where_buckets_cannot_be_shared_after_all_they_are_sent",
    ),
    fault(
        "T42",
        "distributed/shared_memory.py",
        'return next(filter(None, gather_from_ranks([problem])), "")',
        "return problem",
        f"{_RANKS}::test_where_memory_cannot_be_shared_all_ranks_say_why",
    ),
    fault(
        "T42",
        "modules/shared_gradients.py",
        "strategy._ddp_comm_hook is not None or bool(strategy.model._comm_hooks)",
        "strategy._ddp_comm_hook is not None",
        "unit/modules/test_shared_gradients.py::"
        "test_ddp_on_cpus_is_asked_unless_the_user_says_otherwise",
    ),
    fault(
        "T40",
        "rollout/sharing.py",
        "    while _brought_together(found, costs, near):\n        pass\n",
        "",
        "unit/rollout/test_sharing.py::test_shares_by_hand",
    ),
)
