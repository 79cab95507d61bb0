"""Reward models: pairs, their tokens, the head, the loss, and the folder that is left behind."""

from tests.helpers.mutations.base import fault

_FIT = "integration/test_reward_model.py"
_NETWORK = "unit/models/test_scorer_network.py"
_SET = "unit/data/preferences/test_pair_set.py"

MUTATIONS = (
    fault(
        "T04",
        "data/preferences/pairs.py",
        'if identical == "error" and len(different) < len(rejected):',
        "if False:",
        "unit/data/preferences/test_pairs.py::test_identical_answers_are_an_error_or_left_out",
    ),
    fault(
        "T06",
        "data/preferences/pair_set.py",
        "whole = [self.tokens.token_ids(text) for text in texts]",
        "pass",
        f"{_SET}::test_t06_too_long_pairs_are_an_error_dropped_or_cut_at_the_front",
    ),
    fault(
        "T10",
        "models/loading.py",
        "    if not keep_dropout:\n        silence_modules(model)",
        "    if False:\n        silence_modules(model)",
        "unit/models/test_loading.py",
        f"{_NETWORK}::test_t10_dropout_is_off_unless_it_is_kept",
    ),
    fault(
        "T15",
        "models/pad_token.py",
        "if tokenizer.pad_token is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:",
        "if tokenizer.pad_token is not None:",
        f"{_NETWORK}::test_t15_the_pad_token_of_the_export_is_none_that_texts_end_with",
    ),
    fault(
        "T23",
        "data/preferences/pair_set.py",
        'path="-", plain_prompts=self.plain_prompts, include_prompt=self.include_prompt',
        'path="-", plain_prompts="text", include_prompt=self.include_prompt',
        f"{_SET}::test_t23_the_ids_are_those_that_the_reward_component_scores",
    ),
    fault(
        "T24",
        "models/reward_model.py",
        "ids, mask = ids.gather(1, order), mask.gather(1, order)",
        "pass",
        f"{_NETWORK}::test_t24_scores_do_not_depend_on_the_side_or_the_ids_of_padding",
    ),
    fault(
        "T37",
        "models/loading.py",
        "    if not _has_one_score(_config(config, folder)):\n        start_head(",
        "    if True:\n        start_head(",
        f"{_NETWORK}::test_t37_a_reward_model_is_taken_over_with_its_head",
    ),
    fault(
        "T38",
        "data/preferences/pair_batches.py",
        "rows = [e.chosen for e in examples] + [e.rejected[0] for e in examples]",
        "rows = [row for e in examples for row in (e.chosen, e.rejected[0])]",
        f"{_SET}::test_parts_keep_pairs_together_and_to_the_budget",
    ),
    fault(
        "T39",
        "modules/pair_steps.py",
        "return whole.masked_fill(aside, 0).sum(), sums",
        "return whole.masked_fill(aside, 0).mean(), sums",
        "integration/test_reward_model_steps.py::test_t38_t39_the_cut_into_microbatches_changes_nothing",
    ),
    fault(
        "T39",
        "functional/preferences.py",
        "return ((lead.sign() + 1) / 2).where(~lead.isnan(), lead)",
        "return (lead >= 0).double().where(~lead.isnan(), lead)",
        "unit/functional/test_preferences.py::test_ties_count_half",
    ),
    fault(
        "T42",
        "modules/pair_steps.py",
        "everyone = sorted(gather_objects(own))",
        "everyone = sorted(own)",
        "distributed/test_reward_model_ranks.py",
    ),
)
