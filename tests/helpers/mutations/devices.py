"""Packed attention, decoding and compiling on a device."""

from tests.helpers.mutations.base import fault

_GRAPHS = "unit/rollout/test_graphs.py::"

MUTATIONS = (
    fault(
        "T02",
        "models/attention_cuda.py",
        "-1 if window is None else window - 1",
        "-1 if window is None else window",
        "unit/models/test_attention_cuda.py::test_the_kernel_says_what_the_padded_grid_says",
    ),
    fault(
        "T21",
        "rollout/engines/graphs.py",
        "            buffer[count:slots].zero_()\n",
        "",
        _GRAPHS + "test_slots_behind_hold_nothing_of_the_step_before",
    ),
    fault(
        "T21",
        "rollout/engines/slots.py",
        "int(slots.lengths.max()) + 1",
        "int(self._sent(slots.lengths).max()) + 1",
        _GRAPHS + "test_a_step_waits_for_the_device_once",
    ),
    fault(
        "T21",
        "rollout/engines/base.py",
        "torch.no_grad(), uncompiled(base_causal_lm(model)):",
        "torch.no_grad():",
        "unit/models/test_compiling.py::test_decoding_runs_the_plain_code",
    ),
)
