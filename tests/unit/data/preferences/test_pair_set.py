"""Pairs in tokens: the same as when they are scored, cut, split and padded."""

import logging

import pytest
import torch

from ppo_lightning.data import as_records, read_pairs
from ppo_lightning.data.preferences.pair_batches import (
    PairBatch,
    idle_pair_part,
    pair_parts,
    row_batches,
)
from ppo_lightning.data.preferences.pair_set import (
    PairReader,
    pair_examples,
    split_by_prompt,
    warn_of_shared_prompts,
)
from ppo_lightning.errors import DataError
from ppo_lightning.models import ScorerTokens, SequenceScorer
from ppo_lightning.rewards import SequenceClassifierReward
from ppo_lightning.types import Completions
from tests.helpers.preferences import rule_pairs
from tests.helpers.tiny_models import character_tokenizer, word_tokenizer

CPU = torch.device("cpu")
TOKENIZERS = {
    "words": word_tokenizer,
    "characters": character_tokenizer,
}


def reader(tokenizer="characters", *, plain="text", include_prompt=True, **options) -> PairReader:
    tokens = ScorerTokens(TOKENIZERS[tokenizer](), **options)
    return PairReader(tokens=tokens, plain_prompts=plain, include_prompt=include_prompt)


def pairs_of(*records):
    return read_pairs(as_records(list(records)))


PLAIN = {"prompt": "a cat?", "chosen": " good", "rejected": " bad one"}
CHAT = {
    "messages": [{"role": "user", "content": "a cat?"}],
    "chosen": "good",
    "rejected": "bad one",
}


@pytest.mark.parametrize("plain", ["text", "chat"])
@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("tokenizer", ["words", "characters"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_t23_the_ids_are_those_that_the_reward_component_scores(
    tiny_reward_dir, plain, include_prompt, tokenizer, append_eos
):
    # Built on the very folder, so that template, tokens and end token all have a say.
    component = SequenceClassifierReward(
        str(tiny_reward_dir), plain_prompts=plain, include_prompt=include_prompt
    )
    scorer = SequenceScorer.load(str(tiny_reward_dir), append_eos=append_eos, max_length=12)
    scorer.tokenizer = TOKENIZERS[tokenizer]()
    scorer.tokenizer.truncation_side = "left"
    asked = Completions(
        prompts=["a cat?"] * 2,
        messages=[None, ({"role": "user", "content": "a cat?"},)],
        responses=[" good", "good"],
        prompt_ids=[()] * 2,
        response_ids=[()] * 2,
        truncated=[False] * 2,
        metadata=[{}] * 2,
    )
    expected = [scorer.token_ids(text) for text in component.inputs(asked)]
    own = reader(
        tokenizer,
        plain=plain,
        include_prompt=include_prompt,
        append_eos=append_eos,
        max_length=12,
    )
    rows = [own.rows(pair)[0][0] for pair in pairs_of(PLAIN, CHAT)]
    assert [list(row) for row in rows] == expected


def test_examples_hold_rows_and_lengths_of_the_answers_alone():
    (example,) = pair_examples(pairs_of(PLAIN | {"margin": 1.5}), reader())
    assert len(example.chosen) == len("a cat? good")
    assert (example.chosen_length, example.rejected_lengths) == (len(" good"), (len(" bad one"),))
    assert (example.margin, example.number, example.width) == (1.5, 0, len("a cat? bad one"))


def test_several_rejected_answers_are_pairs_of_their_own_or_stay_together():
    pairs = pairs_of(PLAIN | {"rejected": [" bad", " no"]}, PLAIN)
    each = pair_examples(pairs, reader())
    assert [(e.number, len(e.rejected)) for e in each] == [(0, 1), (1, 1), (2, 1)]
    assert each[1].pair.rejected[0][0]["content"] == " no"
    together = pair_examples(pairs, reader(), each=False)
    assert [(e.number, len(e.rejected)) for e in together] == [(0, 2), (1, 1)]
    assert together[0].against(1).rejected == each[1].rejected


def test_t06_too_long_pairs_are_an_error_dropped_or_cut_at_the_front(caplog):
    pairs = pairs_of(PLAIN, PLAIN | {"prompt": "a cat and a dog and a bird?"})
    own = reader(max_length=20)
    with pytest.raises(DataError, match=r"list\[1\]: .*35 tokens, more than 20.*overlong"):
        pair_examples(pairs, own)
    with caplog.at_level(logging.WARNING):
        assert len(pair_examples(pairs, own, overlong="drop")) == 1
        cut = pair_examples(pairs, own, overlong="truncate")[1]
    assert "1 of 2 pairs dropped" in caplog.text
    assert "1 of 2 pairs cut at the front" in caplog.text
    text = "".join(own.tokens.tokenizer.convert_ids_to_tokens(list(cut.chosen)))
    assert text == "a cat and a dog and a bird? good"[-20:]


def test_answers_of_the_same_tokens_say_nothing():
    same = pairs_of(PLAIN | {"chosen": " Good", "rejected": " good"})  # lower case to the model
    with pytest.raises(DataError, match=r"list\[0\]: .*same tokens"):
        pair_examples(same, reader())
    with pytest.raises(DataError, match="none of 1 pairs is left"):
        pair_examples(same, reader(), identical="drop")
    assert len(pair_examples([*same, *pairs_of(PLAIN)], reader(), identical="drop")) == 1


def test_a_template_that_refuses_is_named_with_the_record():
    own = reader()
    own.tokens.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"list\[0\]: the chat template refuses .*alternate"):
        own.rows(pairs_of(CHAT)[0])


def test_no_prompt_is_on_both_sides_of_the_split_whatever_the_order():
    pairs = pairs_of(*rule_pairs(200, num_prompts=40))
    train, held_out = split_by_prompt(pairs, 0.3)
    assert len(train) + len(held_out) == 200
    assert 20 < len(held_out) < 110
    assert not {p.prompt_key for p in train} & {p.prompt_key for p in held_out}
    again = split_by_prompt(pairs[::-1], 0.3)
    assert again == (train[::-1], held_out[::-1])
    more = split_by_prompt(pairs, 0.5)[1]
    assert {p.prompt_key for p in held_out} < {p.prompt_key for p in more}


def test_shared_prompts_are_warned_of(caplog):
    examples = pair_examples(pairs_of(PLAIN, PLAIN | {"prompt": "who?"}), reader())
    with caplog.at_level(logging.WARNING):
        assert warn_of_shared_prompts(examples[:1], examples) == 1
        assert warn_of_shared_prompts(examples[:1], examples[1:]) == 0
    assert "prompts of 1 of 2 held-out pairs" in caplog.text


def test_parts_keep_pairs_together_and_to_the_budget():
    examples = pair_examples(pairs_of(*rule_pairs(17)), reader("words"))
    parts = pair_parts(examples, max_tokens=60, device=CPU)
    assert sum(len(part.margins) for part in parts) == 17
    assert len(parts) > 3
    for part in parts:
        assert part.input_ids.numel() <= 60 or len(part.margins) == 1
        assert len(part.input_ids) == 2 * len(part.margins)
        assert part.attention_mask[:, 0].all()
        assert part.attention_mask.sum(1).max() == part.input_ids.shape[1]
    rows = {
        (tuple(i[m.bool()].tolist()), tuple(j[n.bool()].tolist()))
        for part in parts
        for i, j, m, n in zip(*part.input_ids.chunk(2), *part.attention_mask.chunk(2), strict=True)
    }
    assert rows == {(e.chosen, e.rejected[0]) for e in examples}
    assert len(pair_parts(examples, max_tokens=None, device=CPU)) == 1
    assert pair_parts([], max_tokens=60, device=CPU) == []
    assert not idle_pair_part(CPU).counts.any()


def test_rows_come_back_under_their_numbers():
    rows = [(1, 2, 3), (4,), (5, 6), (7, 8, 9, 10)]
    found = {}
    for numbers, ids, mask in row_batches(rows, max_tokens=4, device=CPU):
        assert ids.numel() <= 4
        for number, row, real in zip(numbers, ids, mask, strict=True):
            found[number] = tuple(row[real.bool()].tolist())
    assert found == dict(enumerate(rows))


def test_batches_stay_what_they_are_on_the_way_to_a_device():
    batch = PairBatch(examples=(), epoch=0, step=1, num_steps=2)
    assert batch.to("cpu") is batch
    assert len(batch) == 0
