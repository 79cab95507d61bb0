"""From one step to the next: what a run leaves behind, and whether the next one starts with it."""

from tests.helpers.mutations.base import fault

MUTATIONS = (
    fault(
        "T04",
        "data/preferences/labels.py",
        'if read not in (*CHOICES, "", None):',
        "if False:",
        "unit/data/preferences/test_labels.py::test_bad_lines_are_named",
    ),
    fault(
        "T23",
        "diagnostics/start.py",
        'return same_words and "" != reward.chat_template != policy.chat_template != ""',
        "return False",
        "unit/diagnostics/test_start.py::test_one_of_another_template_is_named",
    ),
    fault(
        "T23",
        "diagnostics/start.py",
        "if stranger and reward.sft_fingerprint not in policy.lineage:",
        "if False:",
        "integration/test_wrong_start.py::test_a_reward_model_of_another_sft_model_is_named",
    ),
    fault(
        "T23",
        "modules/sft.py",
        "save_model(self.network, self.tokenizer, folder)",
        "save_model(self.network, load_tokenizer(self.policy.path), folder)",
        "integration/test_chain.py::test_the_sft_models_template_goes_all_the_way",
    ),
    fault(
        "T25",
        "diagnostics/start.py",
        "if not start.kl_ref > most:",
        "if True:",
        "integration/test_wrong_start.py::"
        "test_the_base_in_its_place_is_named_with_kl_and_fingerprints",
    ),
    fault(
        "T29",
        "rewards/separation.py",
        "wins = sum(pair.gap > 0 for pair in usable)",
        "wins = sum(pair.gap >= 0 for pair in usable)",
        "unit/rewards/test_separation.py::test_share_interval_and_gap_by_hand",
    ),
    fault(
        "T29",
        "rewards/separation.py",
        "if len(numbers) == 1 and len(scores) > 1:",
        "if False:",
        "unit/rewards/test_separation.py::test_constant_and_missing_scores_are_said",
    ),
    fault(
        "T39",
        "modules/start.py",
        "all_reduce_sum(torch.stack([part.double() for part in own])).tolist()",
        "torch.stack([part.double() for part in own]).tolist()",
        "distributed/test_chain_ranks.py::test_the_kl_at_the_start_is_of_all_ranks",
    ),
    fault(
        "T42",
        "modules/export_model.py",
        "if any_rank(failure is not None, trainer.strategy.root_device):",
        "if failure is not None:",
        "distributed/test_chain_ranks.py::test_all_ranks_end_where_the_first_cannot_write",
    ),
    fault(
        "T53",
        "modules/export_model.py",
        'self._kept = dict(state_dict["weights"])',
        "self._kept = {}",
        "integration/test_export_model.py::test_a_resumed_run_knows_the_best_weights_of_before",
    ),
)
