import pytest
import torch

from ppo_lightning.data import PromptList, PromptSet, left_pad, make_prompt_batch
from tests.helpers.tiny_models import word_tokenizer

PROMPTS = PromptSet.build(PromptList(["the dog", "a"]), word_tokenizer(), chat=False)
TWO = torch.arange(2)


def batch(numbers, **tensors):
    size = torch.arange(len(numbers))
    tensors = {"keys": size + 70, "indices": size + 80, "groups": size + 90} | tensors
    return make_prompt_batch(PROMPTS, numbers, pad_id=0, **tensors)


def test_padding_is_on_the_left():
    ids, mask = left_pad([[5], [6, 7, 8]], 9)
    assert ids.tolist() == [[9, 9, 5], [6, 7, 8]]
    assert mask.tolist() == [[False, False, True], [True, True, True]]
    assert (ids.dtype, mask.dtype) == (torch.long, torch.bool)


def test_t15_mask_comes_from_lengths_where_the_pad_id_is_a_token():
    ids, mask = left_pad([[2, 5, 2], [2]], 2)
    assert ids.tolist() == [[2, 5, 2], [2, 2, 2]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]


def test_no_rows_give_an_empty_batch():
    ids, mask = left_pad([], 0)
    assert ids.shape == mask.shape == (0, 0)
    assert len(batch([])) == 0


def test_batch_has_one_row_for_each_number():
    made = batch([1, 0, 0])
    words = word_tokenizer().convert_ids_to_tokens
    assert [words(row) for row in made.prompt_ids.tolist()] == [
        ["<pad>", "<s>", "a"],
        ["<s>", "the", "dog"],
        ["<s>", "the", "dog"],
    ]
    assert made.prompt_mask.sum(1).tolist() == [2, 3, 3]
    assert [record.text for record in made.records] == ["a", "the dog", "the dog"]
    assert made.keys.tolist() == [70, 71, 72]
    assert made.indices.tolist() == [80, 81, 82]
    assert made.groups.tolist() == [90, 91, 92]


def test_batch_can_be_cut():
    assert batch([1, 0, 0]).select(torch.tensor([2])).records[0].text == "the dog"


@pytest.mark.parametrize("name", ["keys", "indices", "groups"])
@pytest.mark.parametrize("wrong", [torch.arange(3), torch.zeros(2, 1), torch.tensor(1)])
def test_other_lengths_are_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"`{name}` must have the shape \(2,\)"):
        batch([0, 1], **{name: wrong})
