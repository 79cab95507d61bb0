"""Moments, gradients and weights cut by DeepSpeed's ZeRO; its tests need the extra `deepspeed`."""

from tests.helpers.mutations.base import fault

_ZERO = "distributed/test_zero.py::"
_ONE = _ZERO + "test_t47_t48_t49_zero_gives_the_result_of_one_process"
_RESUME = "distributed/test_zero_resume.py::"
_ALIKE = _RESUME + "test_t51_a_run_goes_on_under_another_strategy_on_other_ranks"

MUTATIONS = (
    fault(
        "T46",
        "distributed/shards.py",
        "with kept_together(*modules):",
        "with kept_together():",
        _ZERO + "test_t46_ranks_may_decode_for_different_numbers_of_steps",
    ),
    fault(
        "T48",
        "modules/zero_optimizer.py",
        "        self.zero.clear_backward_seen_flag()\n",
        "",
        _ONE,
    ),
    fault(
        "T48",
        "modules/zero_strategy.py",
        '"gradient_clipping": 0.0,',
        '"gradient_clipping": 1.0,',
        _ONE,
    ),
    fault(
        "T48",
        "modules/zero_optimizer.py",
        "        base.register_step_pre_hook(self._leave_out)\n",
        "",
        _ONE,
    ),
    fault(
        "T49",
        "modules/optim.py",
        "sum_over_ranks(torch.nn.utils.get_total_norm(gradients).double().square()).sqrt()",
        "torch.nn.utils.get_total_norm(gradients)",
        _ONE,
    ),
    fault(
        "T51",
        "modules/zero_layout.py",
        "numbers = numbers[rank * _share(weight) : (rank + 1) * _share(weight)]",
        "numbers = numbers[: _share(weight)]",
        _ALIKE,
    ),
    fault(
        "T51",
        "modules/zero_optimizer.py",
        "            self.zero.refresh_fp32_params()",
        "            pass",
        _RESUME + "test_t42_t49_ranks_decide_and_stay_alike",
        _RESUME + "test_killed_ranks_go_on_bit_for_bit",
    ),
    fault(
        "T51",
        "modules/zero_layout.py",
        "(w, value.clone() if isinstance(value, Tensor) else value) for w in self.weights",
        "(w, value) for w in self.weights",
        _ALIKE,
    ),
    fault(
        "T46",
        "distributed/partitions.py",
        "        _offload.get_param_coordinator = _NoOrder\n",
        "        _offload.get_param_coordinator = _offload.get_param_coordinator\n",
        _RESUME + "test_t42_t49_ranks_decide_and_stay_alike",
    ),
)
