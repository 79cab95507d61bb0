"""Prompts, models and sampled responses."""

from tests.helpers.mutations.base import fault

MUTATIONS = (
    fault(
        "T01",
        "rewards/arguments.py",
        "return float(value) if _SCIENTIFIC.fullmatch(value.strip()) else value",
        "return value",
        "unit/rewards/test_function.py::test_scientific_notation_reaches_the_function_as_a_number",
    ),
    fault(
        "T02",
        "cli/save_config.py",
        '            set_aside(Path(folder or ".") / self.config_filename)',
        '            Path(folder or ".")',
        "integration/test_cli_fit.py::test_t02_a_config_in_the_folder_is_kept_and_the_run_goes_on",
    ),
    fault(
        "T03",
        "io.py",
        "head = len(_BOM) if offset == 0 and raw.startswith(_BOM) else 0",
        "head = 0",
        "unit/data/test_sources.py::test_t03_byte_order_mark_changes_nothing",
    ),
    fault(
        "T04",
        "io.py",
        "    if not text:\n        return None\n",
        "",
        "unit/test_io.py::test_blank_lines_are_skipped_but_counted",
    ),
    fault(
        "T04",
        "data/records.py",
        "keys found: {', '.join(keys) or 'none'}. ",
        "",
        "unit/data/test_sources.py::"
        "test_t04_one_error_names_file_line_keys_and_setting_of_every_bad_record",
    ),
    fault(
        "T05",
        "io.py",
        'return raw[head:].decode("utf-8")',
        'return raw[head:].decode("utf-8", errors="replace")',
        "unit/data/test_sources.py::test_t05_other_encoding_is_an_error_with_file_and_byte",
    ),
    fault(
        "T06",
        "data/prompts.py",
        "return replace(record, prompt=text, text=text), (*head, *tail)",
        "return record, (*head, *tail)",
        "unit/data/test_prompts.py::"
        "test_t06_truncate_keeps_the_end_and_the_text_is_that_of_the_tokens",
    ),
    fault(
        "T07",
        "rollout/datamodule.py",
        "return room if wanted is None else wanted",
        "return wanted",
        "unit/rollout/test_datamodule.py::"
        "test_t07_the_models_room_limits_prompts_where_nothing_else_does",
    ),
    fault(
        "T07",
        "modules/ppo.py",
        "None if positions is None else positions - self.sampling.max_new_tokens",
        "positions",
        "integration/test_trainer_flags.py::"
        "test_t07_a_prompt_that_leaves_no_room_is_refused_with_the_numbers",
    ),
    fault(
        "T08",
        "data/rendering.py",
        "return [row if row[: len(head)] == head else head + row for row in rows]",
        "return [head + row for row in rows]",
        "unit/data/test_rendering.py::test_t08_chat_ids_are_those_of_the_template_in_one_step",
    ),
    fault(
        "T52",
        "rollout/datamodule.py",
        'self.position = int(state_dict["position"])',
        "self.position = 0",
        "unit/rollout/test_datamodule.py::test_t52_position_and_seed_survive_a_resume",
    ),
    fault(
        "T09",
        "functional/masking.py",
        "return (attention_mask.cumsum(-1) - 1).clamp_min(0)",
        "return torch.ones_like(attention_mask).cumsum(-1) - 1",
        "unit/models/test_scoring.py::test_t09_left_padded_logprobs_equal_rows_scored_alone",
    ),
    fault(
        "T10",
        "models/loading.py",
        "noise = silence_config(config)",
        "noise = {}",
        "unit/models/test_loading.py::test_t10_no_dropout_anywhere_even_in_training_mode",
    ),
    fault(
        "T10",
        "models/loading.py",
        "    silence_modules(model)\n",
        "",
        "unit/models/test_loading.py::test_t10_dropout_that_no_config_rules_is_off_too",
    ),
    fault(
        "T11",
        "modules/update.py",
        "temperature=self.temperature,\n            logits=exact,",
        "temperature=1.0,\n            logits=exact,",
        "property/test_module_properties.py::test_the_ratio_is_one_before_the_first_update",
    ),
    fault(
        "T11",
        "rollout/engines/draw.py",
        "ids, token_logprobs(scaled, ids, temperature=1.0)",
        "ids, token_logprobs(logits, ids, temperature=1.0)",
        "unit/rollout/test_engines.py::test_recorded_logprobs_are_those_of_a_forward_pass",
    ),
    fault(
        "T12",
        "rollout/engines/generate.py",
        "with fork, _own_settings_aside(model):",
        "with fork:",
        "unit/rollout/test_engines.py::test_t12_the_folders_own_sampling_settings_are_not_used",
    ),
    fault(
        "T13",
        "rollout/engines/native.py",
        "    going = ~out.ended\n",
        "    if t + 1 == sampling.max_new_tokens:\n"
        "        ids = end_ids[:1].expand_as(ids)\n"
        "    going = ~out.ended\n",
        "unit/rollout/test_engines.py::test_t13_no_end_token_is_written_over_the_last_sampled_one",
    ),
    fault(
        "T14",
        "rollout/engines/native.py",
        "response_mask=mask_from_lengths(lengths, width),",
        "response_mask=torch.isin(\n"
        "                torch.cat([p.ids for p in parts])[:, :width],\n"
        "                torch.tensor(stops.end_ids),\n"
        "            ).long().roll(1, 1).cumsum(1) == 0,",
        "unit/rollout/test_engines.py::test_t14_masks_come_from_lengths",
    ),
    fault(
        "T15",
        "rollout/engines/native.py",
        "response_mask=mask_from_lengths(lengths, width),",
        "response_mask=torch.cat([p.ids for p in parts])[:, :width] != stops.pad_id,",
        "unit/rollout/test_engines.py::test_t15_end_token_is_valid_where_pad_equals_end",
    ),
    fault(
        "T15",
        "data/collate.py",
        "mask = torch.arange(width) >= width - lengths[:, None]  # [B, P]",
        "mask = prompt_ids != pad_id",
        "unit/data/test_collate.py::test_t15_mask_comes_from_lengths_where_the_pad_id_is_a_token",
    ),
    fault(
        "T16",
        "rollout/engines/native.py",
        "out.ended |= going & torch.isin(ids, end_ids)",
        "out.ended |= going & torch.isin(ids, end_ids[:1])",
        "unit/rollout/test_engines.py::test_t16_any_of_several_end_tokens_ends_the_response",
    ),
    fault(
        "T17",
        "models/scoring.py",
        "inputs = model_inputs(sequences, final=False)",
        "inputs = model_inputs(sequences, final=True)",
        "unit/models/test_scoring.py::test_t17_a_token_changes_its_own_logprob_and_those_after_it",
    ),
    fault(
        "T17",
        "models/actor_critic.py",
        "values = states[:, : mask.shape[1]].masked_fill(~mask, 0)",
        "values = states[:, -mask.shape[1] :].masked_fill(~mask, 0)",
        "unit/models/test_scoring.py::test_t17_value_i_is_of_the_state_before_token_i",
    ),
    fault(
        "T18",
        "modules/collection.py",
        " & rollout.response_mask.any(1)\n",
        "\n",
        "unit/modules/test_collection.py",
    ),
    fault(
        "T19",
        "rollout/texts.py",
        "        response_ids=response_ids,\n",
        "        response_ids=[decoder.encode(decoder.decode(ids)) for ids in response_ids],\n",
        "integration/test_iteration.py::"
        "test_t19_sampled_ids_go_to_the_loss_and_text_to_the_rewards",
    ),
    fault(
        "T20",
        "models/checks.py",
        "if highest >= rows:",
        "if highest > rows:",
        "unit/models/test_checks.py::test_t20_a_token_without_a_row_is_named_with_both_sizes",
    ),
)
