import pytest

from ppo_lightning.data import JsonlPrompts, PromptList, PromptSet, shuffled_order
from ppo_lightning.errors import DataError
from tests.helpers.tiny_models import byte_pair_tokenizer, word_tokenizer
from tests.unit.data.prompts.test_rendering import byte_tokenizer

SENTENCE = "the cat sat on the big red house and a dog ran under the tree "
LONG = (SENTENCE * 3).rsplit(" ", 6)[0]  # 40 words
SHORT = "hello dog"


def build(*prompts, tokenizer=None, **options):
    options = {"chat": False} | options
    return PromptSet.build(PromptList(prompts), tokenizer or word_tokenizer(), **options)


def refused(*prompts, **options):
    with pytest.raises(DataError) as caught:
        build(*prompts, **options)
    return str(caught.value)


def test_set_holds_records_and_ids():
    prompts = build("the dog", {"prompt": "a cat", "answer": 3})
    assert len(prompts) == 2
    record, ids = prompts[1]
    assert (record.text, record.metadata, record.origin) == ("a cat", {"answer": 3}, "prompts[1]")
    assert list(ids) == word_tokenizer()("a cat")["input_ids"]


def test_t06_error_names_the_record_both_numbers_and_the_setting():
    said = refused(SHORT, LONG, max_prompt_tokens=16)
    assert said.startswith("prompts[1]: the prompt has 41 tokens")
    assert "`max_prompt_tokens` = 16" in said
    assert "`overlong`" in said


def test_t06_drop_removes_and_counts():
    prompts = build(SHORT, LONG, SHORT, max_prompt_tokens=16, overlong="drop")
    assert (len(prompts), prompts.num_dropped, prompts.num_truncated) == (2, 1, 0)
    assert [record.origin for record in prompts.records] == ["prompts[0]", "prompts[2]"]
    assert [len(ids) for ids in prompts.ids] == [3, 3]


def test_t06_truncate_keeps_the_end_and_the_text_is_that_of_the_tokens():
    tokenizer = word_tokenizer()
    prompts = build(SHORT, LONG, max_prompt_tokens=16, overlong="truncate")
    record, ids = prompts[1]
    assert len(ids) == 16
    assert (len(prompts), prompts.num_dropped, prompts.num_truncated) == (2, 0, 1)
    assert list(ids) == [tokenizer.bos_token_id, *tokenizer(LONG)["input_ids"][-15:]]  # T08 holds
    assert record.prompt == record.text == " ".join(LONG.split()[-15:])
    assert prompts[0][0].text == SHORT


def test_t06_truncate_without_bos_keeps_the_last_tokens():
    tokenizer = byte_pair_tokenizer()
    prompts = build(LONG, tokenizer=tokenizer, max_prompt_tokens=16, overlong="truncate")
    assert list(prompts.ids[0]) == tokenizer(LONG)["input_ids"][-16:]
    assert LONG.endswith(prompts.records[0].text)


@pytest.mark.parametrize("limit", range(1, 12))
def test_t06_truncate_never_leaves_part_of_a_character(limit):
    text = "ab你好🇫🇷"  # 2 x 1, 2 x 3 and 2 x 4 bytes, one token each
    prompts = build(text, tokenizer=byte_tokenizer(), max_prompt_tokens=limit, overlong="truncate")
    record, ids = prompts[0]
    assert 1 <= len(ids) <= limit
    if limit >= 4:  # below, not even one character fits
        assert record.text
        assert text.endswith(record.text)
        assert len(ids) == len(record.text.encode())


@pytest.mark.parametrize("limit", [1, 2])
def test_t06_smallest_limits_keep_the_last_word(limit):
    prompts = build("the cat sat", max_prompt_tokens=limit, overlong="truncate")
    assert len(prompts.ids[0]) == limit
    assert prompts.records[0].text == "sat"


def test_t06_prompts_at_the_limit_are_left_alone():
    prompts = build("the cat sat", max_prompt_tokens=4)
    assert len(prompts.ids[0]) == 4


@pytest.mark.parametrize("prompt", [LONG, {"messages": [{"role": "user", "content": LONG}]}])
def test_t06_chats_are_not_truncated_since_that_cuts_their_template(prompt):
    said = refused(SHORT, prompt, chat=True, max_prompt_tokens=16, overlong="truncate")
    assert said.startswith("prompts[1]: the chat has")
    assert "`drop` or `error`" in said


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_t06_template_counts_towards_the_limit(policy):
    tokens = len(build(SHORT, chat=True).ids[0])
    assert tokens > 5
    kept = build(SHORT, chat=True, max_prompt_tokens=tokens, overlong=policy)
    assert len(kept) == 1
    assert "tokens" in refused(SHORT, chat=True, max_prompt_tokens=tokens - 1, overlong=policy)


def test_t06_dropping_every_prompt_is_an_error():
    assert "all 2 prompts" in refused(LONG, LONG, max_prompt_tokens=16, overlong="drop")


def test_limit_below_one_is_refused():
    assert "at least 1" in refused(SHORT, max_prompt_tokens=0)


def test_prompt_without_tokens_is_named():
    assert refused("dog", "", tokenizer=byte_pair_tokenizer()).startswith(
        "prompts[1]: the prompt h"
    )


def test_skipped_records_are_counted(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "the dog"}\n{"q": 1}\n')
    source = JsonlPrompts(path, on_error="skip")
    assert PromptSet.build(source, word_tokenizer()).num_skipped == 1


def test_t52_order_has_each_prompt_once_a_pass():
    order = shuffled_order(10, 0, 30, seed=3)
    passes = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(numbers) == list(range(10)) for numbers in passes)
    assert len({tuple(numbers) for numbers in passes}) == 3


def test_t52_order_depends_on_the_position_only():
    # 10 prompts in batches of 2, 3 or 7: stopping and going on anywhere leaves the order alone.
    whole = shuffled_order(10, 0, 42, seed=3)
    for size in (2, 3, 7):
        parts = [shuffled_order(10, start, size, seed=3) for start in range(0, 42, size)]
        assert [number for part in parts for number in part] == whole


def test_order_differs_between_seeds_and_is_shuffled():
    orders = {tuple(shuffled_order(10, 0, 10, seed=seed)) for seed in range(20)}
    assert len(orders) == 20
    assert tuple(range(10)) not in orders


def test_every_prompt_comes_first_about_equally_often():
    # 4 prompts, 2000 passes: 500 times each, deviation 19.4; 100 is more than five of them.
    first = shuffled_order(4, 0, 8000, seed=0)[::4]
    assert all(abs(first.count(number) - 500) < 100 for number in range(4))


def test_order_is_the_same_on_every_machine():
    # As it came out when it was written: a run of then must resume in the same order.
    assert shuffled_order(6, 4, 8, seed=1) == [4, 5, 3, 4, 0, 2, 1, 5]


def test_set_gives_the_order_of_its_length():
    prompts = build("a", "the", "dog")
    assert prompts.order(2, 5, seed=7) == shuffled_order(3, 2, 5, seed=7)
    assert prompts.order(5, 0, seed=7) == []


def test_one_prompt_is_repeated():
    assert shuffled_order(1, 5, 3, seed=0) == [0, 0, 0]
