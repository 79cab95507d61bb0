"""Rows of a minibatch are shared out by length, each to one replica."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_lightning.rollout import sharing
from ppo_lightning.rollout.sharing import balanced_shares, rows_of_all_replicas, share_of
from ppo_lightning.types import Experience, Sequences, TrunkStates


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(1, 4))
def test_every_item_is_in_one_share_and_none_costs_much_more(costs, number):
    shares = balanced_shares(costs, number)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share for share in shares) or len(costs) < number
    spent = [sum(costs[item] for item in share) for share in shares]
    assert max(spent) - min(spent) <= max(costs, default=0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_two_shares_are_within_a_sixth_of_the_best(costs):
    best = min(
        max(sum(c for c, s in zip(costs, sides, strict=True) if s == side) for side in (0, 1))
        for sides in product((0, 1), repeat=len(costs))
    )
    found = max(sum(costs[item] for item in share) for share in balanced_shares(costs, 2))
    assert found <= 7 / 6 * best


def test_a_share_of_the_usual_lengths_is_within_a_hundredth_of_the_mean():
    generator = torch.Generator().manual_seed(0)
    over = []
    for _ in range(100):
        ends = torch.empty(8).exponential_(0.035, generator=generator).ceil().clamp(max=64)
        costs = (33 + ends).tolist()
        dearest = max(sum(costs[item] for item in share) for share in balanced_shares(costs, 2))
        over.append(dearest / (sum(costs) / 2) - 1)
    assert sum(over) / len(over) < 0.01  # 0.018 without exchanges, 0.006 at best


def test_shares_by_hand():
    # Handed out the dearest first, [[0, 3], [1, 2, 4]] with 8 and 10: a 4 for a 3 evens them out.
    assert balanced_shares([5, 4, 3, 3, 3], 2) == [[0, 1], [2, 3, 4]]
    assert balanced_shares([3, 3, 2, 2, 2], 2) == [[2, 3, 4], [0, 1]]
    assert balanced_shares([2, 2, 2], 2) == [[0, 2], [1]]
    assert balanced_shares([], 2) == [[], []]


@pytest.mark.parametrize("together", [1, 2])
def test_the_shares_of_a_minibatch_make_it_up(together):
    rows = torch.tensor([6, 7, 2, 3, 0, 1])
    lengths = torch.tensor([9, 1, 4, 4, 100, 100, 3, 2])
    shares = [share_of(rows, lengths, owner=o, owners=2, together=together) for o in (0, 1)]
    assert sorted(torch.cat(shares).tolist()) == sorted(rows.tolist())
    if together == 2:  # 5, 8 and 10 tokens: prompts stay whole
        assert [share.tolist() for share in shares] == [[0, 1], [6, 7, 2, 3]]
    empty = share_of(rows[:2], lengths, owner=1, owners=2, together=2)
    assert empty.shape == (0,)
    assert empty.dtype == torch.long


def part(indices, prompt, response):
    """Rows whose every number tells the response and the place."""
    numbers = torch.tensor(indices)[:, None]
    ids = numbers * 100 + torch.arange(prompt).flip(0)  # counted from the end: padding is in front
    answers = numbers * 100 + torch.arange(response) + 50
    floats = answers.float()
    sequences = Sequences(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        response_ids=answers,
        response_mask=torch.ones_like(answers, dtype=torch.bool),
    )
    return Experience(
        sequences=sequences,
        old_logprobs=floats,
        old_values=floats + 1,
        ref_logprobs=floats + 2,
        advantages=floats + 3,
        returns=floats + 4,
        indices=numbers[:, 0],
        num_responses=5,
        iteration=3,
        policy_version=12,
        temperature=0.7,
    )


@pytest.fixture
def two_replicas(monkeypatch):
    first, second = part([0, 2, 4], 3, 2), part([1, 3], 2, 4)
    monkeypatch.setattr(sharing, "num_replicas", lambda: 2)
    monkeypatch.setattr(sharing, "gather_objects", lambda items: [*items, second])
    return first


def test_rows_of_all_replicas_come_in_order_and_padded(two_replicas):
    whole = rows_of_all_replicas(two_replicas)
    assert whole.indices.tolist() == [0, 1, 2, 3, 4]
    assert whole.sequences.prompt_ids[1].tolist() == [0, 101, 100]
    assert whole.sequences.prompt_mask.sum(1).tolist() == [3, 2, 3, 2, 3]
    assert whole.sequences.response_ids[2].tolist() == [250, 251, 0, 0]
    assert whole.sequences.response_mask.sum(1).tolist() == [2, 4, 2, 4, 2]
    assert whole.returns[3].tolist() == [354, 355, 356, 357]
    assert whole.advantages[4].tolist() == [453, 454, 0, 0]
    assert (whole.num_responses, whole.iteration, whole.policy_version) == (5, 3, 12)
    assert whole.temperature == 0.7


def test_weights_travel_where_there_are_some(two_replicas, monkeypatch):
    def weighed(rows):
        return replace(rows, importance_weights=rows.returns * 2)

    gathered = sharing.gather_objects
    monkeypatch.setattr(
        sharing, "gather_objects", lambda items: list(map(weighed, gathered(items)))
    )
    whole = rows_of_all_replicas(two_replicas)
    assert torch.equal(whole.importance_weights, whole.returns * 2)


def test_states_of_frozen_blocks_stay_where_they_are(two_replicas):
    ids = two_replicas.sequences.input_ids
    trunk = TrunkStates(states=torch.zeros(ids.numel() + 1, 2), places=torch.zeros_like(ids))
    own = replace(two_replicas, sequences=replace(two_replicas.sequences, trunk=trunk))
    assert rows_of_all_replicas(own) is own


def test_one_process_keeps_its_rows():
    own = part([0, 1, 2, 3, 4], 3, 2)
    assert rows_of_all_replicas(own) is own
