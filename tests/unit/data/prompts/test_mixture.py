from collections import Counter

import pytest

from ppo_lightning.data import (
    MixturePart,
    MixturePrompts,
    PromptList,
    PromptReader,
    StreamedPrompts,
)
from ppo_lightning.data.prompts.mixture import mixed_order
from tests.helpers.tiny_models import byte_pair_tokenizer

WEIGHTS = [1, 0.1, 2.5]


def part(letter, count, **options):
    return MixturePart(source=[f"{letter}{n}" for n in range(count)], **options)


def feed_of(*parts, **options):
    reader = PromptReader(tokenizer=byte_pair_tokenizer(), chat=False, **options)
    return MixturePrompts(list(parts)).feed(reader)


def texts(feed, position, count, seed=3):
    return [record.text for record in feed.take(position, count, seed=seed).records]


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_exact_in_every_stretch(seed):
    order = [part for part, _ in mixed_order(WEIGHTS, 0, 3600, seed=seed)]
    for start in (0, 7, 1000):
        for length in (36, 360, 2500):
            counts = Counter(order[start : start + length])
            for number, weight in enumerate(WEIGHTS):
                # A part's times are evenly spaced: less than one prompt more or fewer, and as much
                # again since the stretch is bounded by the prompts of the others.
                assert abs(counts[number] - length * weight / 3.6) < 2.5


def test_shares_of_a_whole_period_are_the_weights():
    # 0.1 is a tenth: 36 prompts hold 10, 1 and 25, over and over.
    order = [part for part, _ in mixed_order(WEIGHTS, 0, 36_000, seed=1)]
    assert Counter(order) == {0: 10_000, 1: 1_000, 2: 25_000}


def test_order_is_a_function_of_seed_and_position():
    whole = mixed_order(WEIGHTS, 0, 500, seed=3)
    for size in (1, 7, 100):
        parts = [mixed_order(WEIGHTS, start, size, seed=3) for start in range(0, 500, size)]
        assert [entry for part in parts for entry in part][:500] == whole
    assert mixed_order(WEIGHTS, 0, 500, seed=4) != whole


def test_each_part_goes_through_its_own_positions():
    order = mixed_order([1, 2, 3], 0, 600, seed=0)
    for number, count in enumerate((100, 200, 300)):
        assert [at for part, at in order if part == number] == list(range(count))


def test_far_positions_cost_no_more():
    far = 10**15
    order = mixed_order([1, 2], far, 6, seed=0)
    assert Counter(part for part, _ in order) == {0: 2, 1: 4}


def test_each_part_comes_once_a_pass_in_a_shuffled_order():
    feed = feed_of(part("a", 10), part("b", 20, weight=3))
    found = texts(feed, 0, 400)
    of_a = [text for text in found if text[0] == "a"]
    of_b = [text for text in found if text[0] == "b"]
    assert (len(of_a), len(of_b)) == (100, 300)
    for size, texts_of in ((10, of_a), (20, of_b)):
        passes = [texts_of[start : start + size] for start in range(0, len(texts_of), size)]
        assert all(len(set(one)) == size for one in passes)
        assert len({tuple(one) for one in passes}) == len(passes)


def test_prompts_know_the_part_that_they_were_drawn_from():
    feed = feed_of(part("a", 7, name="sums"), part("b", 5))
    records = feed.take(0, 24, seed=3).records
    assert {record.text[0]: record.group for record in records} == {"a": "sums", "b": "part 1"}
    inner = MixturePart(source=MixturePrompts([part("a", 3), part("b", 3)]), name="both")
    nested = feed_of(inner, part("c", 3, name="c")).take(0, 9, seed=3).records
    assert {r.text[0]: r.group for r in nested} == {"a": "both", "b": "both", "c": "c"}


def test_parts_of_one_size_are_not_in_step():
    feed = feed_of(part("a", 50), part("b", 50))
    found = texts(feed, 0, 100)
    numbers = [[text[1:] for text in found if text[0] == letter] for letter in "ab"]
    assert numbers[0] != numbers[1]


def test_resume_goes_on_with_the_next_prompt():
    feed = feed_of(part("a", 7), part("b", 5, weight=0.3))
    whole = texts(feed, 0, 40)
    first = feed.take(0, 13, seed=3)
    assert first.position == 13
    assert [record.text for record in first.records] + texts(feed, 13, 27) == whole


def test_dropped_prompts_of_a_stream_make_room_for_others_and_none_repeats(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"a{n}{' long' * 9 * (n % 2)}\n" for n in range(20)))
    stream = MixturePart(source=StreamedPrompts(path))
    feed = feed_of(stream, part("b", 20), max_prompt_tokens=20, overlong="drop")
    taken, position = [], 0
    for count in (3, 5, 1, 11, 10):  # as batches of any size: the dropped ones are never counted
        one = feed.take(position, count, seed=0)
        taken += [record.text for record in one.records]
        position = one.position
    assert taken == texts(feed, 0, 30, seed=0)
    assert 30 < position <= 40  # all that can be used of one pass through both
    assert sorted(text for text in taken if text[0] == "a") == sorted(
        f"a{n}" for n in range(0, 20, 2)
    )
    assert len({text for text in taken if text[0] == "b"}) == 20


def test_counts_and_shares_are_logged(caplog):
    with caplog.at_level("DEBUG", logger="ppo_lightning.data"):
        feed = feed_of(part("a", 7, name="sums"), part("b", 5, weight=3))
        feed.take(0, 4, seed=0)
    assert "mixture: sums has 7 prompts, 25.0 % of those drawn" in caplog.text
    assert "drawn at position 0: {'sums': 1, 'part 1': 3}" in caplog.text


def test_as_held_out_prompts_a_mixture_is_all_of_them():
    mixture = MixturePrompts([part("a", 2), part("b", 3, weight=9)])
    assert [raw.prompt for raw in mixture.read()] == ["a0", "a1", "b0", "b1", "b2"]


def test_its_parts_know_their_prompts():
    assert len(feed_of(part("a", 2), part("b", 3)).keys()) == 5


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_means_nothing_is_refused(weight):
    with pytest.raises(ValueError, match="`weight` must be a finite number above 0"):
        part("a", 1, weight=weight)


def test_parts_need_names_of_their_own_and_there_must_be_some():
    with pytest.raises(ValueError, match="two of 'x'"):
        MixturePrompts([part("a", 1, name="x"), part("b", 1, name="x")])
    with pytest.raises(ValueError, match="at least one"):
        MixturePrompts([])
    assert MixturePrompts([part("a", 1)]).sources[0].read()[0].prompt == "a0"
    assert isinstance(MixturePrompts([part("a", 1)]).sources[0], PromptList)
