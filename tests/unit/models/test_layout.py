"""Where tokens lie before a model, and where their numbers go."""

from dataclasses import replace

import pytest
import torch

from ppo_lightning.models.layout import TokenLayout
from tests.helpers.sequences import sequences_of

PROMPTS, RESPONSES = [[5, 9, 11], [12, 7, 30, 8, 21]], [[20, 13, 17, 2], [9, 22]]
BATCH = sequences_of(PROMPTS, RESPONSES, extra=1, padding=99)


def test_packed_rows_hold_every_token_but_the_last_of_each():
    layout = TokenLayout.of(BATCH, packed=True)
    assert layout.inputs.input_ids.tolist() == [[5, 9, 11, 20, 13, 17, 12, 7, 30, 8, 21, 9]]
    assert layout.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]
    assert layout.inputs.packing.lengths == (6, 6)


def test_the_last_tokens_are_read_where_the_states_after_them_are_wanted():
    layout = TokenLayout.of(BATCH, packed=True, final=True)
    assert layout.inputs.input_ids.tolist() == [[5, 9, 11, 20, 13, 17, 2, 12, 7, 30, 8, 21, 9, 22]]
    assert layout.inputs.input_ids[0, layout.last_places].tolist() == [2, 22]
    assert layout.asked.tolist() == [*layout.places.tolist(), *layout.last_places.tolist()]


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_each_state_is_the_one_before_its_token(packed, final):
    layout = TokenLayout.of(BATCH, packed=packed, final=final)
    read = layout.inputs.input_ids.flatten()[layout.places]
    assert read.tolist() == [11, 20, 13, 17, 21, 9]
    assert layout.targets.tolist() == [20, 13, 17, 2, 9, 22]
    assert layout.on_tokens(layout.targets).tolist() == [[20, 13, 17, 2, 0], [9, 22, 0, 0, 0]]


@pytest.mark.parametrize("final", [False, True])
def test_what_stands_under_padding_is_not_read(final):
    layout = TokenLayout.of(BATCH, packed=False, final=final)
    assert 99 not in layout.inputs.input_ids
    assert (layout.inputs.input_ids[layout.inputs.attention_mask == 0] == 0).all()
    assert layout.inputs.attention_mask.sum(1).tolist() == [6 + final, 6 + final]


@pytest.mark.parametrize("packed", [False, True])
def test_holes_are_read_and_not_asked_about(packed):
    mask = BATCH.response_mask.clone()
    mask[0, 1] = False
    layout = TokenLayout.of(replace(BATCH, response_mask=mask), packed=packed, final=True)
    assert layout.targets.tolist() == [20, 17, 2, 9, 22]
    assert layout.inputs.input_ids.flatten()[layout.places].tolist() == [11, 13, 17, 21, 9]
    assert 13 in layout.inputs.input_ids


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_without_tokens_is_asked_nothing(packed):
    mask = BATCH.response_mask.clone()
    mask[0] = False
    layout = TokenLayout.of(replace(BATCH, response_mask=mask), packed=packed, final=True)
    assert layout.targets.tolist() == [9, 22]
    assert layout.last_rows.tolist() == [1]
    assert layout.on_rows(torch.tensor([3.0])).tolist() == [0, 3]


def test_a_prompt_with_several_responses_is_read_once():
    batch = sequences_of(
        [[5, 9, 11], [12, 7], [5, 9, 11], [9, 11]],
        [[20, 13, 17], [9, 22], [4], [6, 8]],
        extra=1,
    )
    layout = TokenLayout.of(batch, packed=True, final=True)
    row = [5, 9, 11, 20, 13, 17, 12, 7, 9, 22, 4, 9, 11, 6, 8]
    assert layout.inputs.input_ids.tolist() == [row]
    assert layout.inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 3, 0, 1, 2, 3]]
    packing = layout.inputs.packing
    assert packing.lengths == (6, 4, 4, 4)
    grid = [[row[token] for token in packing.tokens[i * 6 : i * 6 + n]]
            for i, n in enumerate(packing.lengths)]  # fmt: skip
    assert grid == [[5, 9, 11, 20, 13, 17], [12, 7, 9, 22], [5, 9, 11, 4], [9, 11, 6, 8]]
    assert packing.tokens[packing.cells].tolist() == list(range(len(row)))
    read = layout.inputs.input_ids[0, layout.places].tolist()
    assert read == [11, 20, 13, 7, 9, 11, 11, 6]
    assert layout.inputs.input_ids[0, layout.last_places].tolist() == [17, 22, 4, 8]


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_filler_makes_the_number_round_and_is_seen_by_nobody(shared, final):
    batch = sequences_of([PROMPTS[0]] * 2 if shared else PROMPTS, RESPONSES)
    plain = TokenLayout.of(batch, packed=True, final=final)
    layout = TokenLayout.of(batch, packed=True, final=final, multiple=5)
    count = plain.inputs.input_ids.shape[1]
    assert count % 5 != 0
    assert layout.inputs.input_ids.shape[1] == count + -count % 5
    assert torch.equal(layout.inputs.input_ids[:, :count], plain.inputs.input_ids)
    assert torch.equal(layout.places, plain.places)
    assert layout.inputs.packing.lengths == (*plain.inputs.packing.lengths, -count % 5)


@pytest.mark.parametrize("shared", [False, True])
def test_no_filler_is_longer_than_the_rows_that_there_are(shared):
    batch = sequences_of([PROMPTS[0]] * 2 if shared else PROMPTS, RESPONSES)
    plain = TokenLayout.of(batch, packed=True, final=True)
    count = plain.inputs.input_ids.shape[1]
    narrow = TokenLayout.of(batch, packed=True, final=True, multiple=100)
    assert narrow.inputs.input_ids.shape[1] == 100
    longest = max(plain.inputs.packing.lengths)  # positions end there, and grids for attention
    assert max(narrow.inputs.packing.lengths) == longest
    assert int(narrow.inputs.position_ids.max()) < longest
    assert torch.equal(narrow.places, plain.places)
    assert (
        TokenLayout.of(batch, packed=True, final=True, multiple=1).inputs.input_ids.shape[1]
        == count
    )
