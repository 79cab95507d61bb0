"""Cutting a buffer: everything is used once, the same way on any number of ranks."""

import pytest
import torch

from ppo_lightning.distributed import owned_indices
from ppo_lightning.rollout import RolloutLoader, microbatch_rows, minibatch_rows
from ppo_lightning.types import Experience, Sequences


def sequences(prompts, responses):
    def mask(lengths, left):
        width = max(lengths)
        rows = [[True] * n + [False] * (width - n) for n in lengths]
        return torch.tensor([row[::-1] if left else row for row in rows])

    prompt_mask, response_mask = mask(prompts, True), mask(responses, False)
    return Sequences(
        prompt_ids=prompt_mask.long(),
        prompt_mask=prompt_mask,
        response_ids=response_mask.long(),
        response_mask=response_mask,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_t40_sizes_that_do_not_divide(ranks):
    """Every response is in one minibatch, and the minibatches do not depend on the ranks."""
    whole = [set(rows.tolist()) for rows in cut(7, rank=0, ranks=1)]
    assert sorted(len(piece) for piece in whole) == [1, 2, 2, 2]
    merged = [set() for _ in whole]
    for rank in range(ranks):
        owned = owned_indices(7, owner=rank, owners=ranks)
        for piece, rows in zip(merged, cut(7, rank=rank, ranks=ranks), strict=True):
            piece |= set(owned[rows].tolist())
    assert merged == whole


def cut(total, *, rank, ranks):
    indices = owned_indices(total, owner=rank, owners=ranks)
    return minibatch_rows(indices, num_responses=total, num_minibatches=4, key=5)


def test_shuffles_differ_by_key():
    orders = {
        tuple(
            torch.cat(
                minibatch_rows(torch.arange(8), num_responses=8, num_minibatches=2, key=key)
            ).tolist()
        )
        for key in range(5)
    }
    assert len(orders) == 5


def test_microbatches_keep_to_the_budget_and_use_each_row_once():
    batch = sequences([3, 1, 2, 5, 1], [4, 1, 6, 2, 1])
    groups = microbatch_rows(batch, max_tokens=16)
    assert sorted(torch.cat(groups).tolist()) == [0, 1, 2, 3, 4]
    assert len(groups) > 1
    for rows in groups:
        assert batch.select(rows).trimmed().num_padded_tokens <= 16


def test_packed_rows_fill_the_budget_with_real_tokens():
    batch = sequences([3, 1, 2, 5, 1], [4, 1, 6, 2, 1])
    groups = microbatch_rows(batch, max_tokens=13, packed=True)
    assert [rows.tolist() for rows in groups] == [[2], [0], [3, 1, 4]]  # 8, 7 and 7 + 2 + 2


def test_a_prompt_that_comes_again_costs_nothing_beside_itself():
    batch = sequences([3, 3, 2, 3], [4, 1, 6, 2])
    # Rows 0, 1 and 3 have one prompt.
    groups = microbatch_rows(batch, max_tokens=10, packed=True)
    assert [rows.tolist() for rows in groups] == [[2], [0, 1, 3]]  # 8, and 3 + 4 + 1 + 2


def test_responses_to_a_prompt_may_stay_together():
    pieces = minibatch_rows(
        torch.arange(24), num_responses=24, num_minibatches=4, key=5, together=3
    )
    assert sorted(torch.cat(pieces).tolist()) == list(range(24))
    for rows in pieces:
        assert (rows.view(-1, 3) // 3 == rows.view(-1, 3)[:, :1] // 3).all()
    assert torch.cat(pieces).tolist() != list(range(24))


def test_a_row_longer_than_the_budget_stands_alone():
    groups = microbatch_rows(sequences([5, 1], [9, 1]), max_tokens=4)
    assert sorted(rows.tolist() for rows in groups) == [[0], [1]]


def test_no_rows_make_no_microbatch():
    empty = sequences([1], [1]).select(torch.arange(0))
    assert microbatch_rows(empty, max_tokens=4) == []
    assert microbatch_rows(empty, max_tokens=None) == []


def test_a_response_without_tokens_does_not_break_the_cut():
    batch = sequences([2, 2], [0, 3])
    trimmed = batch.select(torch.tensor([0])).trimmed()
    assert trimmed.response_ids.shape == (1, 1)
    assert not trimmed.response_mask.any()


def experience(total, iteration):
    zeros = torch.zeros(total, 1)
    return Experience(
        sequences=sequences([1] * total, [1] * total),
        old_logprobs=zeros,
        old_values=zeros,
        ref_logprobs=zeros,
        advantages=zeros,
        returns=zeros,
        indices=torch.arange(total),
        num_responses=total,
        iteration=iteration,
        policy_version=0,
        temperature=1.0,
    )


def test_loader_collects_at_the_first_next_and_yields_its_length():
    calls = []

    def collect():
        calls.append(1)
        return experience(6, iteration=len(calls))

    loader = RolloutLoader(collect, num_minibatches=2, num_epochs=3, seed=0)
    iter(loader)
    iterator = iter(loader)
    assert calls == []  # Lightning calls `iter` more often than it iterates
    batches = list(iterator)
    assert calls == [1]
    assert len(batches) == len(loader) == 6
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2, 2]
    assert [batch.is_first for batch in batches] == [True] + [False] * 5
    assert [batch.is_last for batch in batches] == [False] * 5 + [True]
    for epoch in range(3):
        used = torch.cat([b.experience.indices for b in batches if b.epoch == epoch])
        assert sorted(used.tolist()) == list(range(6))
    orders = {tuple(b.experience.indices.tolist()) for b in batches}
    assert len(orders) > 2  # each pass has its own shuffle
