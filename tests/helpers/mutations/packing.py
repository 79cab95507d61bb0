"""Rows without padding, and what is computed of them."""

from tests.helpers.mutations.base import fault

_READING = "unit/models/test_reading.py::"
_ALIKE = _READING + "test_packed_rows_give_the_numbers_and_gradients_of_padded_ones"

MUTATIONS = (
    fault(
        "T17",  # sequences would see what lies before them in the row
        "models/attention.py",
        "if min(lengths) < max(lengths):",
        "if False:",
        _ALIKE,
    ),
    fault(
        "T17",  # heads of the key that several heads look at, in another order
        "models/attention.py",
        "heads.repeat_interleave(repeats, dim=1)",
        "heads.repeat(1, repeats, 1, 1)",
        _READING + "test_families_that_need_the_plain_way_get_it",
    ),
    fault(
        "T44",  # a product is compiled for each number of tokens
        "models/layout.py",
        "if multiple > 1:",
        "if False:",
        _READING + "test_products_in_16_bits_come_in_round_sizes",
    ),
    fault(
        "T44",
        "functional/output_layer.py",
        "pad(hidden, (0, 0, 0, missing))",
        "pad(hidden, (0, 0, missing, 0))",
        "unit/functional/test_output_layer.py::"
        "test_a_number_of_rows_that_is_not_round_changes_nothing_in_16_bits",
    ),
    fault(
        "T17",  # weights that lie the other way round get their gradient turned
        "functional/products.py",
        "of_weight = product(rows.t(), grad).t()",
        "of_weight = product(grad.t(), rows).roll(1, 0)",
        "unit/functional/test_products.py::test_numbers_and_gradients_are_those_of_torch",
    ),
    fault(
        "T44",  # autocast is passed by
        "functional/products.py",
        'and not torch.is_autocast_enabled("cpu")',
        "and True",
        "unit/functional/test_products.py::test_autocast_rules_the_dtype",
    ),
    fault(
        "T17",  # queries turned by the negative of their position
        "models/fused/rotary.py",
        "first -= right * of_left",
        "first += right * of_left",
        "unit/models/test_fused_rotary.py::"
        "test_the_turn_and_its_gradients_are_bit_by_bit_the_familys",
    ),
    fault(
        "T21",  # a product is kept that was to be made again
        "models/fused/gates.py",
        "with _recomputed(gate, up, product) if product.requires_grad else nullcontext():",
        "with nullcontext():",
        "unit/models/test_fused_gates.py::test_the_product_is_let_go",
    ),
    fault(
        "T17",  # a second backward pass would read what the first has written over
        "functional/output_layer.py",
        "logs = kept[number].clone()",
        "logs = kept[number]",
        "unit/functional/test_output_layer.py::test_gradients_can_be_asked_for_twice",
    ),
    fault(
        "T17",  # states of another token
        "types.py",
        "places=self.places[:, first:last])",
        "places=self.places[:, : last - first])",
        "unit/models/test_frozen_trunk.py::"
        "test_passes_that_begin_behind_frozen_blocks_say_the_same",
        "unit/test_types.py::test_states_follow_the_sequences_that_they_are_of",
    ),
    fault(
        "T10",  # states with dropout, or of weights that somebody trains meanwhile
        "models/frozen_trunk.py",
        "if trunk is None or trained_names(model) != trunk.trained:",
        "if trunk is None:",
        "unit/models/test_frozen_trunk.py::test_what_is_no_constant_any_more_is_not_kept",
    ),
    fault(
        "T21",  # embeddings that are trained lie below frozen blocks
        "models/frozen_trunk.py",
        "return any(gradient is not None for gradient in found)",
        "return False",
        "unit/models/test_frozen_trunk.py::test_nor_is_what_never_was_one",
    ),
    fault(
        "T10",
        "models/frozen_trunk.py",
        "return trunk if alike(*asked) else None",
        "return trunk",
        "unit/models/test_frozen_trunk.py::test_nor_is_what_never_was_one",
    ),
    fault(
        "T17",  # keys of a model at its start are so small that it hardly shows who needs them
        "models/last_block.py",
        "fill=torch.nan",
        "fill=0.0",
        "unit/models/test_last_block.py::test_of_a_model_at_its_start_keys_are_all_computed",
    ),
    fault(
        "T21",  # a block that is run again in the backward pass is run otherwise
        "models/last_block.py",
        "nullcontext() if now is None else narrowed(*now)",
        "nullcontext()",
        "unit/models/test_last_block.py::"
        "test_blocks_that_are_run_again_leave_out_what_they_left_out_before",
    ),
    fault(
        "T44",  # a product is compiled for each number of tokens that are asked about
        "models/layout.py",
        "wanted = rounded_up(max(count, 1), multiple)",
        "wanted = rounded_up(max(count, 1), 1)",
        "unit/models/test_last_block.py::test_fillers_are_computed_up_to_a_round_number",
    ),
    fault(
        "T38",  # DDP waits for parameters that the first of two backward passes does not reach
        "modules/update.py",
        "not apart or shares_gradients(self.networks.parameters())",
        "not apart",
        "unit/modules/test_update.py::test_networks_that_share_nothing_go_backward_in_turn",
    ),
)
