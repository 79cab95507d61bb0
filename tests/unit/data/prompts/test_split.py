import logging

import pytest

from ppo_lightning.data import (
    PromptList,
    PromptReader,
    PromptSet,
    RawPrompt,
    SplitPrompts,
    normalized,
    prompt_key,
    warn_of_overlap,
)
from ppo_lightning.errors import DataError
from tests.helpers.tiny_models import byte_pair_tokenizer

TEXTS = [f"prompt number {number}" for number in range(2000)]


def part(name, texts=TEXTS, **options):
    return [raw.prompt for raw in SplitPrompts(PromptList(texts), name, **options).read()]


def feed(source, **options):
    return source.feed(PromptReader(tokenizer=byte_pair_tokenizer(), chat=False, **options))


def test_the_parts_are_the_whole_and_share_nothing():
    train, held_out = part("train"), part("validation")
    assert sorted(train + held_out) == sorted(TEXTS)
    assert not set(train) & set(held_out)


def test_the_share_is_met_within_chance():
    # Binomial: 2000 * 0.1 = 200, deviation 13.4; 67 is five of them.
    assert abs(len(part("validation", share=0.1)) - 200) < 67
    assert abs(len(part("validation", share=0.5)) - 1000) < 112


def test_prompts_stay_on_their_side_when_others_come_or_go():
    held_out = set(part("validation"))
    longer = set(part("validation", texts=[*reversed(TEXTS), *(f"new {n}" for n in range(500))]))
    assert held_out == longer & set(TEXTS)
    assert set(part("validation", texts=TEXTS[::2])) == held_out & set(TEXTS[::2])


def test_a_larger_share_holds_out_what_a_smaller_one_did():
    assert set(part("validation", share=0.1)) < set(part("validation", share=0.2))


def test_the_salt_makes_another_split():
    assert part("validation", salt="b") != part("validation")


def test_the_split_is_the_same_on_every_machine():
    # As it came out when it was written: a run of then must not train on what it held out.
    numbers = [int(text.split()[-1]) for text in part("validation", texts=TEXTS[:60])]
    assert numbers == [7, 19, 21, 27, 31, 34, 40]


def test_like_texts_are_on_one_side_whatever_their_metadata():
    pairs = [(f"Prompt {n}", {"prompt": f"  prompt\t{n} ", "answer": n}) for n in range(100)]
    held_out = part("validation", texts=[entry for pair in pairs for entry in pair], share=0.3)
    assert len(held_out) % 2 == 0
    assert len({normalized(text) for text in held_out}) == len(held_out) / 2


def test_the_feed_holds_the_part():
    source = SplitPrompts(TEXTS[:100], "train", share=0.3)
    assert [record.text for record in feed(source).records] == part(
        "train", texts=TEXTS[:100], share=0.3
    )


def test_splits_may_be_split():
    inner = SplitPrompts(TEXTS, "train", share=0.5)
    outer = SplitPrompts(inner, "train", share=0.5, salt="again")
    assert len(feed(outer)) == len(outer.read()) < 700


def test_a_part_without_prompts_is_an_error():
    with pytest.raises(DataError, match="validation part"):
        part("validation", texts=["one"], share=1e-9)
    with pytest.raises(DataError, match="this part of the split"):
        feed(SplitPrompts(["one"], "validation", share=1e-9))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"part": "test"}, "train, validation, got 'test'"),
        ({"share": 0}, "above 0"),
        ({"share": 1}, "below 1"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        SplitPrompts(["a"], **{"part": "train", **options})


def test_keys_tell_texts_apart_and_a_lone_turn_is_its_text():
    one = RawPrompt(prompt="Hi")
    turn = {"role": "user", "content": "Hi"}
    assert prompt_key(one) == prompt_key(RawPrompt(messages=(turn,), metadata={"a": 1}))
    assert prompt_key(one) != prompt_key(RawPrompt(prompt="hi"))
    two = RawPrompt(messages=({"role": "system", "content": "Hi"}, turn))
    assert prompt_key(two) not in (prompt_key(one), prompt_key(RawPrompt(prompt="HiHi")))
    assert normalized("Ｈｉ\n  THERE ") == "hi there"


# Held-out prompts among the training prompts


def overlap(train, held_out, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = byte_pair_tokenizer()
        sets = [PromptSet.build(PromptList(texts), tokenizer) for texts in (train, held_out)]
        return warn_of_overlap(*sets), caplog.text


def test_held_out_prompts_that_are_trained_on_are_counted_and_the_first_named(caplog):
    count, text = overlap(["a", "b", "c"], ["x", "b", "y", "c"], caplog)
    assert count == 2
    assert "2 of 4 held-out prompts also stand among the training prompts" in text
    assert "first prompts[1]: 'b'" in text


def test_no_overlap_is_not_worth_a_word(caplog):
    assert overlap(["a", "b"], ["x", "A"], caplog) == (0, "")
