"""The records that travel through an iteration: moving, cutting, trimming."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from ppo_lightning.types import MiniBatch, Sequences, TensorRecord, TrunkStates
from tests.helpers.buffers import experience_of, rollout_of
from tests.helpers.sequences import sequences_of

RESPONSES = [[4], [5, 6, 7], [8, 9]]
PROMPTS = [[1, 2], [3], [1, 2, 3, 4]]


def holed(rows: list[str]) -> Sequences:
    """Responses as text: ``x`` is the policy's own, ``o`` another speaker's, ``.`` padding."""
    mask = torch.tensor([[c == "x" for c in row] for row in rows])
    ids = torch.arange(mask.numel()).reshape(mask.shape)
    ones = torch.ones(len(rows), 1, dtype=torch.long)
    return Sequences(prompt_ids=ones, prompt_mask=ones.bool(), response_ids=ids, response_mask=mask)


def test_holes_are_read_and_what_follows_the_last_own_token_is_not():
    sequences = holed(["xoxx.", "x....", ".....", "oxoo.", "xooox"])
    wanted = ["#####.", "##....", "#.....", "###...", "######"]
    assert sequences.attention_mask.tolist() == [[c == "#" for c in row] for row in wanted]


def test_trimming_drops_padding_and_keeps_holes():
    trimmed = holed(["xoox..", "x....."]).trimmed()
    assert trimmed.response_mask.tolist() == [[True, False, False, True], [True, *[False] * 3]]
    assert trimmed.response_ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_trimming_changes_neither_ids_nor_masks_of_what_is_real():
    wide = sequences_of(PROMPTS, RESPONSES, extra=3, padding=99)
    trimmed = wide.trimmed()
    assert trimmed.prompt_ids.shape == (3, 4)
    assert trimmed.response_ids.shape == (3, 3)
    tight = sequences_of(PROMPTS, RESPONSES, padding=99)
    for name in ("prompt_ids", "prompt_mask", "response_ids", "response_mask"):
        assert torch.equal(getattr(trimmed, name), getattr(tight, name))
    assert trimmed.num_padded_tokens == 3 * 7


def test_one_response_column_stays_where_nothing_is_valid():
    empty = sequences_of(PROMPTS, RESPONSES).select(torch.tensor([0]))
    mask = torch.zeros_like(empty.response_mask)
    trimmed = Sequences(
        prompt_ids=empty.prompt_ids,
        prompt_mask=empty.prompt_mask,
        response_ids=empty.response_ids,
        response_mask=mask,
    ).trimmed()
    assert trimmed.response_ids.shape == (1, 1)
    assert trimmed.prompt_ids.shape == (1, 2)


def minibatch() -> MiniBatch:
    sequences = sequences_of(PROMPTS, RESPONSES)
    numbers = torch.arange(9.0).reshape(3, 3)
    experience = experience_of(sequences, old_logprobs=numbers, returns=-numbers, iteration=4)
    return MiniBatch(experience=experience, epoch=1, step=5, num_steps=6, num_epochs=2)


@pytest.mark.parametrize("rows", [[2, 0], [1], []], ids=str)
def test_rows_are_taken_of_every_tensor_and_nothing_else_changes(rows):
    whole = minibatch()
    part = whole.select(torch.tensor(rows, dtype=torch.long))
    assert (part.epoch, part.step, part.experience.iteration) == (1, 5, 4)
    assert part.experience.indices.tolist() == rows
    assert len(part.experience) == len(part.experience.sequences) == len(rows)
    for before, after in zip(tensors(whole), tensors(part), strict=True):
        assert torch.equal(after, before[torch.tensor(rows, dtype=torch.long)])
    assert part.experience.num_responses == 3  # of the buffer, whatever is selected
    assert part.is_last
    assert not part.is_first


def test_records_of_prompts_follow_their_rows():
    rollout = rollout_of(RESPONSES, prompts=PROMPTS)
    part = rollout.select(torch.tensor([2, 1]))
    assert [record.text for record in part.prompts.records] == ["[1, 2, 3, 4]", "[3]"]
    assert part.policy_version == rollout.policy_version
    assert torch.equal(part.sequences.input_ids, rollout.sequences.input_ids[[2, 1]])


def tensors(record) -> list[Tensor]:
    found = []
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found.append(value)
        elif hasattr(value, "select"):
            found += tensors(value)
    return found


def test_every_tensor_moves_and_the_original_stays():
    """The device ``meta`` is everywhere, so this needs no second one."""
    here = minibatch()
    there = here.to("meta")
    assert type(there) is MiniBatch
    assert len(tensors(there)) == 10
    assert {t.device.type for t in tensors(there)} == {"meta"}
    assert {t.device.type for t in tensors(here)} == {"cpu"}
    assert there.num_steps == 6
    assert {t.device.type for t in tensors(rollout_of(RESPONSES).to("meta"))} == {"meta"}


class Moved(torch.Tensor):
    """Writes down how it is asked to move, and stays."""

    asked: list = []  # noqa: RUF012

    def to(self, device, non_blocking=False):
        self.asked.append((str(device), non_blocking))
        return self


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cuda"), "cpu"])
def test_only_copies_to_a_gpu_are_not_waited_for(device):
    batch = minibatch()
    moving = replace(batch.experience, indices=batch.experience.indices.as_subclass(Moved))
    only = [f.name for f in fields(moving) if f.name != "indices"]
    Moved.asked.clear()
    TensorRecord.to(replace(moving, **dict.fromkeys(only)), device)
    assert Moved.asked == [(str(device), "cuda" in str(device))]


# States of frozen blocks


def test_states_follow_the_sequences_that_they_are_of():
    sequences = sequences_of(PROMPTS, RESPONSES, extra=2)
    states = sequences.input_ids.flatten()[:, None].float()  # each token's own id
    places = torch.arange(len(states)).view_as(sequences.input_ids)
    known = replace(sequences, trunk=TrunkStates(states=states, places=places))
    part = known.select(torch.tensor([2, 0])).trimmed().to("cpu")
    cells = torch.arange(part.input_ids.numel()).view_as(part.input_ids)
    assert torch.equal(part.trunk.at(cells)[..., 0], part.input_ids.float())
    assert part.trunk.states.shape == states.shape
    assert part.trunk.at(torch.tensor([999])).shape == (1, 1)  # behind the end: any token's
