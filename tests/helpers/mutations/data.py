"""Formats, streams, mixtures and splits of prompts."""

from tests.helpers.mutations.base import fault

STREAM = "unit/data/streams/test_streamed.py::"
FILES = "unit/data/records/test_files.py::"
MODULE = "unit/rollout/test_datamodule.py::"

MUTATIONS = (
    fault(
        "T01",
        "data/records/functions.py",
        "call(**bind_arguments(call, self.arguments))",
        "call(**self.arguments)",
        "unit/data/records/test_functions.py::test_a_function_yields_objects_under_ones_own_names",
    ),
    fault(
        "T03",
        "data/streams/rows.py",
        "first_line=self.index.line(number), offset=start)",
        "first_line=self.index.line(number), offset=start + 1)",
        f"{STREAM}test_all_formats_stream_what_is_read_at_once",
    ),
    fault(
        "T04",
        "data/records/files.py",
        "line = reader.line_num + 1",
        "line = reader.line_num",
        f"{FILES}test_csv_cells_may_hold_line_ends_and_line_numbers_stay_true",
    ),
    fault(
        "T04",
        "data/records/bad_records.py",
        "self.num_bad += 1",
        "self.num_bad = 1",
        "unit/data/records/test_base.py::test_all_bad_records_come_in_one_report",
    ),
    fault(
        "T04",
        "data/records/plain.py",
        "return value is None or (isinstance(value, float) and math.isnan(value))",
        "return value is None",
        "unit/data/records/test_tables.py::test_nan_in_the_place_of_a_prompt_is_no_prompt",
        "unit/data/records/test_base.py::test_null_and_nan_are_no_values",
    ),
    fault(
        "T04",
        "data/streams/offsets.py",
        "is_open = (is_open + len(quotes)) % 2",
        "is_open = 0",
        "unit/data/streams/test_offsets.py::test_quoted_line_ends_are_part_of_a_record",
    ),
    fault(
        "T04",
        "data/streams/offsets.py",
        "blank[number] = _is_blank(file, int(starts[number]))",
        "blank[number] = False",
        "unit/data/streams/test_offsets.py::test_lines_are_found_wherever_the_file_is_cut",
    ),
    fault(
        "T04",
        "data/prompts/raw.py",
        "{**rest, REFERENCE_ANSWER: messages[-1]",
        '{**rest, "answer": messages[-1]',
        "unit/data/prompts/test_chats.py::test_last_answer_can_be_dropped_and_kept_for_the_rewards",
    ),
    fault(
        "T05",
        "data/records/bad_records.py",
        "if is_of_file(error):",
        "if False:",
        f"{FILES}test_t05_another_encoding_is_an_error_with_file_and_byte",
        f"{STREAM}test_t05_another_encoding_is_always_an_error",
    ),
    fault(
        "T05",
        "data/streams/rows.py",
        "if is_of_file(error):",
        "if False:",
        f"{STREAM}test_t05_another_encoding_is_always_an_error",
    ),
    # A quote inside of a bare cell hides the records up to the next one.
    fault(
        "T04",
        "data/streams/rows.py",
        "if lines.read().strip():",
        "if False:",
        f"{STREAM}test_csv_quotes_inside_of_bare_cells_never_swallow_records",
    ),
    # A quote that is never closed is one bad record, and all below it is lost without a count.
    fault(
        "T04",
        "data/records/files.py",
        'if "unexpected end of data" not in str(error):',
        "if True:",
        f"{FILES}test_csv_quote_that_is_never_closed_is_no_record_to_skip",
    ),
    # What a stream drops goes unsaid.
    fault(
        "T06",
        "data/streams/streamed.py",
        "self.num_dropped += dropped",
        "pass",
        f"{STREAM}test_t06_what_the_limit_does_to_a_stream_is_counted_in_the_log",
    ),
    # A file that has grown since the checkpoint is gone on with in another order, unsaid.
    fault(
        "T52",
        "rollout/datamodule.py",
        "if count != count_before or (known and digest != digest_before):",
        "if False:",
        "unit/rollout/test_datamodule.py::"
        "test_other_prompts_than_before_are_warned_about_on_resume",
    ),
    fault(
        "T06",
        "data/prompts/reader.py",
        "limit=self.max_prompt_tokens,",
        "limit=None,",
        f"{STREAM}test_t06_long_prompts_are_dropped_and_the_next_take_their_places",
        f"{MODULE}test_t06_the_engine_gets_prompts_within_the_limit",
    ),
    fault(
        "T50",
        "rollout/datamodule.py",
        "taken = self.train_set.take(position, num_prompts, seed=self.seed)",
        "taken = self.train_set.take(position, num_prompts, seed=self.seed + replica())",
        f"{MODULE}test_t50_ranks_agree_on_what_a_stream_leaves_out",
    ),
    fault(
        "T52",
        "rollout/datamodule.py",
        "        self.position = position\n",
        "        self.position += num_prompts\n",
        f"{MODULE}test_t52_a_stream_goes_on_with_the_next_prompts_whatever_it_left_out",
    ),
    fault(
        "T52",
        "data/streams/streamed.py",
        "combine_keys(seed, _ORDER, pass_number)",
        "combine_keys(seed, _ORDER, 0)",
        f"{STREAM}test_order_has_each_number_once_a_pass_and_passes_differ",
    ),
    fault(
        "T52",
        "data/streams/offsets.py",
        "if stamp_of(path) != self.stamp:",
        "if False:",
        f"{STREAM}test_a_file_that_changes_during_the_run_ends_it",
    ),
    fault(
        "T52",
        "functional/random.py",
        "found = torch.where(outside, _feistel(found, half, key), found)",
        "found = found % size",
        "property/test_data_properties.py::test_it_is_a_permutation_of_any_size",
    ),
    fault(
        "T52",
        "data/prompts/mixture.py",
        "own_seed = combine_keys(seed, _MIXTURE, part)",
        "own_seed = seed",
        "unit/data/prompts/test_mixture.py::test_parts_of_one_size_are_not_in_step",
    ),
    fault(
        "T52",
        "data/prompts/mixture.py",
        "time = max(0, position - len(shares))",
        "time = position",
        "unit/data/prompts/test_mixture.py::test_order_is_a_function_of_seed_and_position",
    ),
    fault(
        "T52",
        "data/prompts/split.py",
        'prompt_key(raw, likeness="normalized", salt=self.salt)',
        'prompt_key(raw, likeness="exact", salt=self.salt)',
        "unit/data/prompts/test_split.py::test_like_texts_are_on_one_side_whatever_their_metadata",
    ),
    fault(
        "T52",
        "rollout/datamodule.py",
        "                warn_of_overlap(self.train_set, self.val_set)",
        "                pass",
        f"{MODULE}test_held_out_prompts_that_are_trained_on_are_warned_about",
    ),
)
