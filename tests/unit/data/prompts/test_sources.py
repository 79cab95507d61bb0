import json
import logging
import re

import pytest

from ppo_lightning.data import JsonlPrompts, PromptList, RawPrompt, TextPrompts, as_source
from ppo_lightning.errors import DataError

RECORDS = [{"prompt": "one"}, {"prompt": "two", "answer": 4}, {"prompt": "three"}]
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
MIXED = "مرحبا، 你好，שלום 👩‍🚀🇫🇷 ñ"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompts.jsonl"


def write(path, *records, head=b""):
    lines = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    path.write_bytes(head + b"\n".join(lines) + b"\n")
    return path


def message(call, *args):
    with pytest.raises(DataError) as caught:
        call(*args)
    return str(caught.value)


def test_records_become_prompts_with_metadata_and_origin(path):
    prompts = JsonlPrompts(write(path, *RECORDS)).read()
    assert [raw.prompt for raw in prompts] == ["one", "two", "three"]
    assert [raw.metadata for raw in prompts] == [{}, {"answer": 4}, {}]
    assert prompts[1].origin == f"{path}:2"


def test_t03_byte_order_mark_changes_nothing(tmp_path):
    plain = write(tmp_path / "plain.jsonl", *RECORDS)
    marked = write(tmp_path / "marked.jsonl", *RECORDS, head=b"\xef\xbb\xbf")
    read = [JsonlPrompts(file).read() for file in (plain, marked)]
    assert [(raw.prompt, raw.metadata) for raw in read[0]] == [
        (raw.prompt, raw.metadata) for raw in read[1]
    ]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    assert [raw.prompt for raw in TextPrompts(tmp_path / "marked.txt").read()] == ["one", "two"]


@pytest.fixture
def damaged(path):
    """Line 3 is blank, line 5 cut in half, line 7 has another key, the last has no newline."""
    good = [f'{{"prompt": "p{i}"}}' for i in range(8)]
    lines = [*good[:2], "", good[3], good[4][:9], good[5], '{"question": "q", "id": 7}', good[7]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_t04_one_error_names_file_line_keys_and_setting_of_every_bad_record(damaged):
    said = message(JsonlPrompts(damaged).read)
    assert said.startswith(f"{damaged}:5")
    assert "2 of 7 records" in said
    assert re.search(rf"{re.escape(str(damaged))}:5:\d+: is not valid JSON", said)
    assert f"{damaged}:7: has no `prompt` or `messages`; keys found: `question`, `id`." in said
    assert "`prompt_field: question`" in said
    assert "`on_error: skip`" in said


def test_t04_bad_records_are_skipped_counted_and_logged_on_request(damaged, caplog):
    source = JsonlPrompts(damaged, on_error="skip")
    with caplog.at_level(logging.WARNING):
        prompts = source.read()
    assert [raw.prompt for raw in prompts] == ["p0", "p1", "p3", "p5", "p7"]
    assert prompts[-1].origin == f"{damaged}:8"
    assert source.num_skipped == 2
    assert f"{damaged}:7: has no `prompt`" in caplog.text


def test_t04_the_setting_that_the_error_names_mends_it(path):
    write(path, {"question": "q", "id": 7})
    (raw,) = JsonlPrompts(path, prompt_field="question").read()
    assert (raw.prompt, raw.metadata) == ("q", {"id": 7})


def test_many_bad_records_are_not_all_listed(path):
    said = message(JsonlPrompts(write(path, *[{"text": str(i)} for i in range(25)])).read)
    assert said.count("keys found") == 10
    assert "... and 15 more" in said


@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_t05_other_encoding_is_an_error_with_file_and_byte(path, on_error):
    good = b'{"prompt": "fine"}\n'
    path.write_bytes(good + '{"prompt": "你好"}\n'.encode("gbk"))
    said = message(JsonlPrompts(path, on_error=on_error).read)
    assert said.startswith(f"{path}:2: is not UTF-8")
    assert f"byte position {len(good) + 12}" in said


def test_t05_every_script_is_read_as_it_stands(path, tmp_path):
    assert JsonlPrompts(write(path, {"prompt": MIXED})).read()[0].prompt == MIXED
    (tmp_path / "p.txt").write_bytes(f"{MIXED}\n".encode())
    assert TextPrompts(tmp_path / "p.txt").read()[0].prompt == MIXED


def test_half_an_emoji_is_named_and_not_left_to_the_tokenizer(path):
    path.write_bytes(b'{"prompt": "smile \\ud83d"}\n')
    assert f"{path}:1: holds half of a surrogate pair" in message(JsonlPrompts(path).read)


def test_text_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("one\r\n\n  \ntwo\u2028still two\x0cand on\nthree".encode())
    prompts = TextPrompts(path).read()
    assert [raw.prompt for raw in prompts] == ["one", "two\u2028still two\x0cand on", "three"]
    assert [raw.origin for raw in prompts] == [f"{path}:{n}" for n in (1, 4, 5)]


def test_leading_spaces_of_a_text_line_belong_to_the_prompt(tmp_path):
    (tmp_path / "p.txt").write_text("  indented \n")
    assert TextPrompts(tmp_path / "p.txt").read()[0].prompt == "  indented "


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_chat_is_read_from_either_key(path, key):
    chat = [{"role": "system", "content": "s"}, USER, ASSISTANT, {**USER, "weight": 1}]
    (raw,) = JsonlPrompts(write(path, {key: chat, "id": 1})).read()
    assert raw.messages == (chat[0], USER, ASSISTANT, USER)
    assert raw.prompt is None
    assert raw.metadata == {"id": 1}


def test_record_with_both_keys_needs_a_choice(path):
    write(path, {"prompt": "p", "messages": [USER]})
    assert "has both `prompt` and `messages`" in message(JsonlPrompts(path).read)
    (raw,) = JsonlPrompts(path, messages_field=None).read()
    assert (raw.prompt, raw.metadata) == ("p", {"messages": [USER]})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ASSISTANT]}, "ends with a turn of role `assistant`"),
        ({"messages": [USER, {"role": "system", "content": ""}]}, "ends with a turn of role `sys"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "no turn of role `user`"),
        ({"messages": []}, "no turn of role `user`"),
        ({"messages": [{"role": "human", "content": "x"}]}, "turn 1 of `messages` has the unknown"),
        ({"messages": [USER, {"from": "gpt", "value": "x"}]}, "keys found: `from`, `value`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "needs a string under"),
        ({"messages": ["Hi"]}, "must be an object with `role` and `content`, got 'Hi'"),
        ({"messages": "Hi"}, "`messages` must be a list of turns, got 'Hi'"),
        ({"prompt": 7}, "`prompt` must be a string or a list of turns, got 7"),
        ({"prompt": None}, "keys found: `prompt` (null)"),
        ({}, "keys found: none"),
    ],
)
def test_unusable_record_is_named_by_its_line(path, record, expected):
    said = message(JsonlPrompts(write(path, {"prompt": "fine"}, record)).read)
    assert f"{path}:2: " in said
    assert expected in said


def test_unknown_role_lists_the_known_ones(path):
    write(path, {"messages": [{"role": "human", "content": "x"}]})
    assert "`human`. Known roles: system, user, assistant, tool" in message(JsonlPrompts(path).read)


def test_own_source_is_held_to_the_same_rules():
    assert message(lambda: RawPrompt(messages=(USER, ASSISTANT), origin="db:3")).startswith("db:3:")
    assert "either `prompt`" in message(lambda: RawPrompt(origin="db:4"))
    assert "either `prompt`" in message(lambda: RawPrompt(prompt="p", messages=(USER,)))


def test_list_takes_strings_and_objects():
    entries = ["plain", {"prompt": "with", "answer": 1}, {"messages": [USER]}]
    prompts = PromptList(entries).read()
    assert [raw.prompt for raw in prompts] == ["plain", "with", None]
    assert prompts[1].metadata == {"answer": 1}
    assert [raw.origin for raw in prompts] == ["prompts[0]", "prompts[1]", "prompts[2]"]


def test_bad_entry_of_a_list_is_named_by_its_place():
    assert message(PromptList(["fine", 3]).read).startswith("prompts[1]: must be a string")
    assert message(PromptList(["fine", {"q": "x"}]).read).startswith("prompts[1]: has no `prompt`")


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_file_without_prompts_is_named(tmp_path, name):
    (tmp_path / name).write_text("\n  \n")
    assert str(tmp_path / name) in message(as_source(tmp_path / name).read)


@pytest.mark.parametrize("name", ["p.jsonl", "p.txt"])
def test_missing_file_says_where_paths_start(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = message(as_source(name).read)
    assert said.startswith(f"{name}: no such file")
    assert str(tmp_path) in said


def test_empty_list_is_refused():
    assert "empty" in message(PromptList([]).read)


def test_source_is_chosen_by_what_is_given(path):
    source = PromptList(["a"])
    assert as_source(source) is source
    assert isinstance(as_source(["a"]), PromptList)
    assert isinstance(as_source(path), JsonlPrompts)
    assert isinstance(as_source("dir.v2/PROMPTS.TXT"), TextPrompts)


@pytest.mark.parametrize("name", ["prompts.xlsx", "prompts"])
def test_other_endings_are_refused_with_the_way_out(name):
    said = message(as_source, name)
    assert said.startswith(f"{name}: ")
    assert "class_path" in said


def test_both_fields_off_is_refused():
    with pytest.raises(ValueError, match="must not both be null"):
        JsonlPrompts("p.jsonl", prompt_field=None, messages_field=None)
