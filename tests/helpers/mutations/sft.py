"""Supervised fine-tuning."""

from tests.helpers.mutations.base import fault

MUTATIONS = (
    fault(
        "T08",
        "data/demonstrations/learned.py",
        "self._added = [] if ids[: len(self.head)] == self.head else self.head",
        "self._added = self.head",
        "unit/data/demonstrations/test_learned.py::test_t08_one_bos_in_chats_and_plain_texts",
    ),
    fault(  # the end token of an answer is not learned
        "T15",
        "data/demonstrations/learned.py",
        "return next((place + 1 for place in places), None)",
        "return next(places, None)",
        "unit/data/demonstrations/test_learned.py::"
        "test_every_answer_of_a_chat_is_learned_with_its_end_token_and_nothing_else",
    ),
    fault(  # what a template writes behind the end token is learned too
        "T17",
        "data/demonstrations/learned.py",
        "            spans.append((start, stop))\n        return row.example(spans)",
        "            spans.append((start, len(row.ids)))\n        return row.example(spans)",
        "unit/data/demonstrations/test_learned.py::test_chatml_gives_gpt2_a_mask_of_exactly_the_answers",
    ),
    fault(  # logits one place late
        "T17",
        "models/token_rows.py",
        "before = torch.cat([learned[:, 1:], torch.zeros_like(learned[:, :1])], dim=1)",
        "before = learned",
        "unit/models/test_token_rows.py::test_the_loss_is_transformers_own_for_one_example",
    ),
    fault(  # text and answer tokenised at once: a prompt that no rollout would read
        "T19",
        "data/demonstrations/learned.py",
        "self.ids = whole if kept else [*self.ids, *self.learner.ids_of(more)]",
        "self.ids = whole",
        "unit/data/demonstrations/test_learned.py::"
        "test_a_response_that_would_merge_with_its_prompt_is_split_where_a_rollout_splits",
    ),
    fault(  # packed examples see each other
        "T38",
        "models/token_rows.py",
        "seen = same & torch.ones(",
        "seen = torch.ones_like(same) & torch.ones(",
        "unit/models/test_token_rows.py::test_packed_rows_say_what_single_rows_say",
    ),
    fault(  # positions that go on from one packed example to the next
        "T38",
        "data/demonstrations/packing.py",
        "positions[place, start:stop] = torch.arange(len(example))",
        "positions[place, start:stop] = torch.arange(start, stop)",
        "unit/models/test_token_rows.py::test_packed_rows_say_what_single_rows_say",
    ),
    fault(  # each part a mean of its own
        "T39",
        "modules/supervised.py",
        "self.manual_backward(loss * (num_replicas() / max(count, 1.0)))",
        "self.manual_backward(loss / max(float(found[self.sums[0]]) + 1, 1.0))",
        "integration/test_sft.py::test_t38_cut_and_packing_leave_the_step_alone",
    ),
    fault(  # the average of DDP taken for a sum
        "T39",
        "modules/supervised.py",
        "self.manual_backward(loss * (num_replicas() / max(count, 1.0)))",
        "self.manual_backward(loss * (1 / max(count, 1.0)))",
        "distributed/test_sft_ranks.py::test_t39_t40_two_ranks_give_the_weights_and_rows_of_one",
    ),
    fault(  # a rank short of examples does fewer backward passes
        "T40",
        "modules/supervised.py",
        "return parts + [self.idle_part(batch)] * (wanted - len(parts))",
        "return parts or [self.idle_part(batch)]",
        "distributed/test_sft_ranks.py::test_t39_t40_two_ranks_give_the_weights_and_rows_of_one",
    ),
    fault(
        "T43",
        "modules/trainer_checks.py",
        '            "gradient_clip_val",\n            lambda t: t.gradient_clip_val is not None,\n'
        '            f"set `model',
        '            "gradient_clip_val",\n            lambda t: False,\n            f"set `model',
        "integration/test_sft.py::test_t43_settings_that_do_not_fit_are_refused_by_name",
    ),
    fault(
        "T45",
        "modules/supervised.py",
        "            if taken:\n                self._clip(optimizer, norms)",
        "            if True:\n                self._clip(optimizer, norms)",
        "integration/test_sft.py::"
        "test_t45_steps_that_are_not_finite_are_skipped_counted_and_end_the_run",
    ),
    fault(  # of a record in the config, the text "no" becomes False
        "T01",
        "configs/inline.py",
        "InlineRecord = dict[str, str | list[_Turn]",
        "InlineRecord = dict[str, list[_Turn]",
        "integration/test_inline_records.py::"
        "test_t01_text_stays_text_in_files_options_and_saved_configs",
    ),
    fault(  # a resumed run begins its epoch again
        "T52",
        "data/steps/step_loader.py",
        "for step in range(done, self.num_steps):",
        "for step in range(self.num_steps):",
        "integration/test_sft.py::test_a_run_resumed_at_any_step_is_the_run_that_never_stopped",
    ),
    fault(
        "T55",
        "modules/supervised.py",
        "        entry = unpack_checkpoint(checkpoint, self, kind=self.kind)\n",
        "        entry = checkpoint['ppo_lightning']\n",
        "integration/test_sft.py::test_a_run_resumed_at_any_step_is_the_run_that_never_stopped",
    ),
)
