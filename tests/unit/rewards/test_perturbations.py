"""Good answers made bad, in scripts with spaces and without."""

from collections import Counter

import pytest

from ppo_lightning.rewards.perturbations import PERTURBATIONS, Answered, perturbed, words

ENGLISH = "The cat sat on the mat. It was happy."
CHINESE = "我喜欢这部电影。它非常好看！"
THAI = "ฉันชอบภาพยนตร์เรื่องนี้"
MIXED = "我用 Python 写 good 代码"


def one(kind, response, *, prompt="q", seed=0):
    item = Answered(prompt=prompt, response=response, about=prompt)
    return perturbed(kind, [item], seed=seed)[0]


def test_words_are_characters_where_there_are_no_spaces():
    assert words("我喜欢 Python, ok") == ["我", "喜", "欢", "Python,", "ok"]
    assert words("ที่นี่") == ["ที่", "นี่"]  # marks stay on their letters
    assert words("안녕하세요 세계") == ["안녕하세요", "세계"]
    assert words(" \n") == []


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, THAI, MIXED, "네 그렇습니다 친구"])
def test_shuffling_keeps_the_words_and_changes_their_order(text):
    bad = one("shuffled", text)
    assert bad != text
    assert Counter(words(bad)) == Counter(words(text))


@pytest.mark.parametrize("text", [CHINESE, THAI])
def test_no_spaces_are_put_in_where_there_are_none(text):
    for kind in ("shuffled", "truncated", "repeated"):
        assert " " not in one(kind, text)


def test_what_stands_between_words_stays_in_its_place():
    bad = one("shuffled", "one\ntwo  three")
    assert [part for part in bad if part.isspace()] == ["\n", " ", " "]


@pytest.mark.parametrize(
    ("text", "half"),
    [(ENGLISH, "The cat sat on"), (CHINESE, "我喜欢这部电影"), ("a b", "a"), ("a b c", "a")],
)
def test_the_first_half_is_left(text, half):
    assert one("truncated", text) == half


@pytest.mark.parametrize(
    ("text", "padded"),
    [
        ("Good film. See it.", "Good film. See it. See it. See it. See it."),
        ("好看。去看！", "好看。去看！去看！去看！去看！"),
        ("yes", "yes yes yes"),
    ],
)
def test_the_last_sentence_is_repeated_to_more_than_twice_the_length(text, padded):
    assert one("repeated", text) == padded
    assert len(words(padded)) > 2 * len(words(text))


@pytest.mark.parametrize("kind", ["shuffled", "truncated"])
def test_one_word_cannot_be_made_bad(kind):
    assert one(kind, "yes") is None
    assert one("shuffled", "no no no") is None
    assert one(kind, "") is None


def test_nothing_and_the_prompt_itself():
    assert one("empty", ENGLISH) == ""
    assert one("empty", "") is None
    assert one("echo", ENGLISH, prompt="What is it?") == "What is it?"
    assert one("echo", "same", prompt="same") is None


def answers(*abouts):
    return [Answered(prompt=a, response=f"{a}{i}", about=a) for i, a in enumerate(abouts)]


@pytest.mark.parametrize("abouts", ["abcd", "aabb", "aabbc", "abacada", "ab"])
def test_off_topic_is_the_answer_to_another_prompt_each_used_once(abouts):
    items = answers(*abouts)
    for seed in range(20):
        made = perturbed("off-topic", items, seed=seed)
        taken = [bad for bad in made if bad is not None]
        assert len({*taken}) == len(taken)
        pairs = zip(items, made, strict=True)
        assert all(bad is None or bad[0] != item.about for item, bad in pairs)
        if max(Counter(abouts).values()) * 2 <= len(abouts):
            assert len(taken) == len(items)


def test_a_single_prompt_has_no_other_topic():
    assert perturbed("off-topic", answers("a"), seed=0) == [None]
    assert perturbed("off-topic", answers("a", "a"), seed=0) == [None, None]
    assert perturbed("off-topic", [], seed=0) == []


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_the_seed_decides_and_nothing_else(kind):
    items = [Answered(prompt=f"q{i}", response=f"{ENGLISH} {i}", about=f"q{i}") for i in range(6)]
    assert perturbed(kind, items, seed=3) == perturbed(kind, items, seed=3)
    if kind in ("shuffled", "off-topic"):
        assert perturbed(kind, items, seed=3) != perturbed(kind, items, seed=4)
