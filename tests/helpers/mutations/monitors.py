"""Metrics of slices of a buffer, of the update's tail, and the file of histograms."""

from tests.helpers.mutations.base import fault

_SLICES = "unit/modules/test_slices.py::"
_REPORTING = "unit/modules/test_reporting.py::"
_OBJECTIVE = "unit/modules/test_objective.py::"
_FILE = "unit/modules/test_histogram_file.py::"

MUTATIONS = (
    fault(
        "T32",
        "functional/histograms.py",
        "values.double().masked_fill(~mask, 0).sum(0)",
        "values.double().nan_to_num(0, 0, 0).sum(0)",
        "unit/functional/test_histograms.py::test_places_are_added_up_by_hand",
    ),
    fault(
        "T59",
        "functional/histograms.py",
        "min(2**k, width) for k in range(num_bins - 1)",
        "min(2**k, width) for k in range(1, num_bins)",
        "unit/functional/test_histograms.py::test_each_place_is_in_the_bin_of_its_bit_length",
    ),
    fault(
        "T59",
        "functional/histograms.py",
        "low, beyond = min(values), max(values) + 1",
        "low, beyond = min(values), max(values)",
        "unit/functional/test_histograms.py::test_no_whole_number_is_lost_or_counted_twice",
        "unit/functional/test_histograms.py::test_bins_of_whole_numbers_hold_equally_many",
    ),
    fault(
        "T32",
        "modules/slices.py",
        "entropy = collected.networks.entropy.double().masked_fill(~mask, 0).sum(1).tolist()",
        "entropy = collected.networks.entropy.double().sum(1).tolist()",
        _SLICES + "test_rows_are_those_in_the_buffer_with_the_tokens_that_losses_count",
    ),
    fault(
        "T59",
        "modules/slices.py",
        "    entropy = math.fsum(row.entropy for row in rows)\n",
        "    entropy = tokens * math.fsum(r.entropy / (r.tokens or 1) for r in rows) / len(rows)\n",
        _SLICES + "test_groups_are_means_over_their_responses_and_tokens",
    ),
    fault(
        "T42",
        "modules/slices.py",
        "        score=math.fsum(row.score for row in rows) / len(rows),\n",
        "        score=sum(row.score for row in rows) / len(rows),\n",
        _SLICES + "test_the_order_of_responses_changes_no_bit",
    ),
    fault(
        "T40",
        "modules/reporting.py",
        "self.responses = gather_objects(own)",
        "self.responses = own",
        "distributed/test_monitor_ranks.py",
    ),
    fault(
        "T11",
        "modules/reporting.py",
        "sampler_excess = collected.rollout.sampler_logprobs - networks.logprobs",
        "sampler_excess = networks.logprobs - collected.rollout.sampler_logprobs",
        _REPORTING + "test_the_samplers_excess_has_a_sign",
    ),
    fault(
        "T59",
        "modules/reporting.py",
        'quotient(totals, "outside_negative", "negative")',
        'quotient(totals, "outside_negative", "tokens")',
        _REPORTING + "test_shares_by_the_advantages_sign_are_of_tokens_of_that_sign",
    ),
    fault(
        "T35",
        "modules/objective.py",
        "positive, negative = batch.advantages > 0, batch.advantages < 0",
        "positive, negative = batch.advantages >= 0, batch.advantages <= 0",
        _OBJECTIVE + "test_tokens_outside_the_band_are_told_apart_by_their_advantage",
    ),
    fault(
        "T35",
        "modules/objective.py",
        "(ratio > 2) | (ratio < 0.5)",
        "ratio > 2",
        _OBJECTIVE + "test_tokens_outside_the_band_are_told_apart_by_their_advantage",
    ),
    fault(
        "T53",
        "modules/ppo.py",
        '        self.entropy_start = entry.get("entropy_start")\n',
        "",
        _FILE + "test_a_resumed_run_goes_on_in_the_file",
    ),
    fault(
        "T53",
        "modules/update_steps.py",
        "if self.entropy_start is None and stats.policy_version == 0:",
        "if self.entropy_start is None:",
        _FILE + "test_the_start_is_the_first_buffer_before_any_step",
    ),
    fault(
        "T58",
        "modules/histogram_file.py",
        "            self._writer.resume(trainer.current_epoch)\n",
        "            pass\n",
        _FILE + "test_a_resumed_run_goes_on_in_the_file",
    ),
    fault(
        "T59",
        "data/prompts/mixture.py",
        "prompt and (replace(prompt[0], group=name), prompt[1])",
        "prompt",
        "unit/data/prompts/test_mixture.py::test_prompts_know_the_part_that_they_were_drawn_from",
    ),
)
