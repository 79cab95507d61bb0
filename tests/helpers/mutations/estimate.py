"""What an estimate of the memory counts."""

from tests.helpers.mutations.base import fault

_PROCESS = "unit/estimate/test_process.py::"

MUTATIONS = (
    fault(
        "T61",
        "estimate/memory.py",
        'return MIXED if mixed and stage != "reward" else PLAIN',
        "return MIXED if mixed else PLAIN",
        _PROCESS + "test_what_a_stage_leaves_in_the_heap_follows_from_its_tensors",
    ),
)
