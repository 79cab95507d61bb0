"""Weights in shards, and layers cut over ranks."""

from tests.helpers.mutations.base import fault

_SHARDED = "distributed/test_sharded.py::"
_SHARDS = "unit/distributed/test_shards.py::"
_RESUME = "distributed/test_sharded_resume.py::"
_ONE = _SHARDED + "test_t47_t48_t49_shards_give_the_result_of_one_process"
_TENSOR = _SHARDED + "test_t48_tensor_parallel_gives_the_result_of_one_process"
_STOP = "distributed/test_two_ranks.py::test_t42_a_stop_that_one_rank_asks_for_is_every_ranks"
_TWO = _SHARDED + "test_t48_shards_in_two_dimensions_give_the_result_of_one_process"

MUTATIONS = (
    fault(
        "T46",
        "modules/collection.py",
        "with gathered(actor):",
        "with gathered():",
        _SHARDED + "test_t46_ranks_may_decode_for_different_numbers_of_steps",
    ),
    fault(
        "T47",
        "distributed/shards.py",
        "            part.reshard()\n",
        "            pass\n",
        _SHARDS + "test_t47_weights_are_whole_inside_and_shares_afterwards",
    ),
    fault(
        "T48",
        "models/scoring.py",
        "return torch.zeros_like(door), grads[0]",
        "return torch.zeros_like(door), grads[0] * 2",
        _ONE,
    ),
    fault(
        "T48",
        "modules/optim.py",
        "norm.double().square() / copies for",
        "norm.double().square() for",
        _TENSOR,
    ),
    fault(
        "T48",
        "distributed/shards.py",
        "parts *= 1 if place.is_replicate() else mesh.size(dimension)",
        "parts *= mesh.size(dimension) if place.is_shard() else 1",
        _TWO,
    ),
    fault(
        "T48",
        "metrics/accumulators.py",
        "process_group or replica_group()",
        "process_group",
        _TENSOR,
    ),
    fault(
        "T49",
        "modules/optim.py",
        "sum_over_ranks(torch.stack(squares).sum())",
        "torch.stack(squares).sum()",
        _ONE,
    ),
    fault(
        "T51",
        "modules/training_state.py",
        "local(own[name]).copy_(weight)",
        "local(own[name])",
        _RESUME + "test_t42_ranks_with_shards_decide_and_stay_alike",
    ),
    fault(
        "T51",
        "distributed/trees.py",
        "made[number] = found.cpu() if keep",
        "made[number] = found.cpu() * 2 if keep",
        _RESUME + "test_t51_a_run_goes_on_under_another_strategy_on_other_ranks",
    ),
    fault(
        "T42",  # a request between two iterations
        "modules/update_steps.py",
        "self.trainer.should_stop = any_rank(self.trainer.should_stop, self.device)",
        "pass",
        _STOP,
    ),
    fault(
        "T42",  # a request before the first step
        "modules/update_steps.py",
        "self._stop_put_off = self.trainer.should_stop and self.trainer.fit_loop._can_stop_early",
        "self._stop_put_off = False",
        _STOP,
    ),
    fault(
        "T47",
        "cli/strategies.py",
        'if word == "fsdp":',
        'if value == "fsdp":',
        "unit/cli/test_strategies.py::test_t47_fsdp_is_the_second_generation",
    ),
    fault(
        "T51",  # another run's start takes a folder for a leftover
        "checkpointing/parts.py",
        "        with _opened(work / _PART.format(rank=rank())) as into:\n"
        "            plain = mapped(checkpoint, described)\n",
        "        plain = mapped(checkpoint, described)\n"
        "        with _opened(work / _PART.format(rank=rank())) as into:\n",
        "unit/checkpointing/test_parts.py::"
        "test_another_run_that_clears_up_leaves_what_is_being_written",
    ),
    fault(
        "T42",  # what torch's writer says of a full disk, which tells nothing
        "checkpointing/parts.py",
        "cause = system_error(error) or error",
        "cause = error",
        "distributed/test_interrupts.py::"
        "test_t42_a_full_disk_of_one_rank_leaves_no_parts_and_the_former_checkpoint",
    ),
    fault(
        "T49",  # a launcher's processes would each train a copy of the run, and say nothing
        "modules/trainer_checks.py",
        "    _refuse_copies(strategy)\n",
        "",
        "unit/modules/test_trainer_checks.py::"
        "test_t49_copies_of_a_run_that_a_launcher_started_are_refused",
    ),
)
