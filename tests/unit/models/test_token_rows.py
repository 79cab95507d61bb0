"""Learned tokens of packed and padded rows."""

from array import array

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from ppo_lightning.configs import PolicyConfig
from ppo_lightning.data import Example, packed_rows, padded_rows, row_groups, token_rows
from ppo_lightning.errors import ModelError
from ppo_lightning.models import check_packing, learned_scores, load_causal_lm

LENGTHS = (9, 4, 7, 2, 5, 3)


def examples(lengths=LENGTHS, vocabulary=40):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [
        Example(ids=array("i", ids), spans=((1, 2), (min(3, len(ids)), len(ids))), origin="")
        for ids in rows
    ]


def scores(model, rows, given, *, packed):
    """Loss summed over the learned tokens, and the gradient of every weight."""
    batch = token_rows(rows, given, packed=packed)
    found = learned_scores(
        model,
        ids=batch.ids,
        learned=batch.learned,
        segments=batch.segments,
        positions=batch.positions,
        packed=packed,
    )
    model.zero_grad()
    (-found.logprobs.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found, gradients


@pytest.fixture(params=["sdpa", "eager"])
def model(request, tiny_model_dir):
    policy = PolicyConfig(path=str(tiny_model_dir), attn_implementation=request.param)
    return load_causal_lm(policy)


def test_the_loss_is_transformers_own_for_one_example(tiny_model_dir):
    (example,) = examples((8,))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    ids = torch.tensor([example.ids.tolist()])
    labels = torch.full_like(ids, -100)
    for start, stop in example.spans:
        labels[0, start:stop] = ids[0, start:stop]
    theirs = model(input_ids=ids, labels=labels).loss
    ours, _ = scores(
        load_causal_lm(PolicyConfig(path=str(tiny_model_dir))), [[0]], [example], packed=False
    )
    assert_close(-ours.logprobs.mean(), theirs, rtol=1e-5, atol=1e-6)


def test_packed_rows_say_what_single_rows_say(model):
    """Logits and gradients alike: examples in one row do not see each other."""
    given = examples()
    alone = [scores(model, [[n]], given, packed=False) for n in range(len(given))]
    rows = packed_rows(given)
    together, gradients = scores(model, rows, given, packed=True)
    order = [number for row in rows for number in row]
    assert_close(
        together.logprobs, torch.cat([alone[n][0].logprobs for n in order]), rtol=0, atol=1e-5
    )
    for name, gradient in gradients.items():
        summed = sum(one[1][name] for one in alone)
        assert_close(gradient, summed, rtol=1e-4, atol=1e-5 * float(summed.abs().max()))


def test_padding_and_other_rows_change_nothing(model):
    given = examples()
    alone, _ = scores(model, [[3]], given, packed=False)
    batch, _ = scores(model, padded_rows(given), given, packed=False)
    batch_rows = token_rows(padded_rows(given), given, packed=False)
    place = next(i for i, row in enumerate(padded_rows(given)) if row == [3])
    before = int(batch_rows.learned[:place].sum())
    found = batch.logprobs[before : before + given[3].num_learned]
    assert_close(found, alone.logprobs, rtol=0, atol=1e-5)


def test_what_stands_under_padding_is_not_read(model):
    given = examples()
    batch = token_rows(packed_rows(given), given, packed=True)
    arguments = {
        "learned": batch.learned,
        "segments": batch.segments,
        "positions": batch.positions,
        "packed": True,
    }
    clean = learned_scores(model, ids=batch.ids, **arguments).logprobs
    dirty = batch.ids.masked_fill(batch.segments == 0, 10**6)
    assert torch.equal(learned_scores(model, ids=dirty, **arguments).logprobs, clean)


def test_a_row_without_a_learned_token_touches_every_weight(model):
    nothing = torch.zeros(1, 1, dtype=torch.long)
    found = learned_scores(
        model,
        ids=nothing,
        learned=nothing.bool(),
        segments=nothing + 1,
        positions=nothing,
        packed=False,
    )
    (-found.logprobs.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rows_are_filled_first_fit_and_never_wider_than_the_longest():
    given = examples()
    rows = packed_rows(given)
    # Longest first: 9; 7 and then 2; 5 and 4; 3.
    assert rows == [[0], [2, 3], [4, 1], [5]]
    assert sorted(n for row in rows for n in row) == list(range(len(given)))
    assert packed_rows([]) == []


@pytest.mark.parametrize("budget", [None, 1, 9, 18, 10**6])
def test_groups_keep_to_the_budget_and_hold_every_example_once(budget):
    given = examples()
    for rows in (packed_rows(given), padded_rows(given)):
        groups = row_groups(rows, given, budget)
        assert sorted(n for group in groups for row in group for n in row) == list(range(6))
        for group in groups:
            width = max(sum(len(given[n]) for n in row) for row in group)
            assert budget is None or len(group) == 1 or len(group) * width <= budget
    assert row_groups([], [], budget) == []


def test_packing_is_tried_on_the_model(model):
    check_packing(model)
    blind = model.get_input_embeddings()
    mixed = blind.register_forward_hook(lambda _, args, out: out + out.cumsum(1))
    with pytest.raises(ModelError, match="would see each other"):
        check_packing(model)
    mixed.remove()


def test_packing_needs_an_attention_that_takes_a_mask(model):
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="`packing: true` needs"):
        check_packing(model)


@pytest.mark.parametrize("kinds", [None, ["full_attention", "sliding_attention"]])
def test_packing_is_refused_where_the_model_looks_back_less_far_than_an_example(model, kinds):
    """The mask of packed rows takes the place of a sliding window's."""
    model.config.sliding_window, model.config.layer_types = 8, kinds
    check_packing(model, longest=8)
    with pytest.raises(ModelError, match=r"looks back 8 tokens at most.*longest .* has 9"):
        check_packing(model, longest=9)
    model.config.layer_types = ["full_attention"] * 2
    check_packing(model, longest=9)
