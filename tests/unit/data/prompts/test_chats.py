import json

import pytest

from ppo_lightning.data import FilePrompts, JsonlPrompts, PromptList, Record, prompt_of, read_turns
from ppo_lightning.errors import DataError

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
SPOKEN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def said(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_turns_keep_role_and_content_only():
    turns = [SYSTEM, {**USER, "weight": 1}, ASSISTANT, USER]
    assert read_turns(turns, "messages") == (SYSTEM, USER, ASSISTANT, USER)


def test_speakers_become_roles():
    spoken = [{"from": "system", "value": "Be brief."}, *SPOKEN]
    assert read_turns(spoken, "conversations") == (SYSTEM, USER, ASSISTANT)


def test_an_unknown_speaker_is_named():
    spoken = [*SPOKEN, {"from": "narrator", "value": "x"}]
    message = said(read_turns, spoken, "conversations")
    assert message.startswith("turn 3 of `conversations` has the unknown speaker `narrator`")


def test_a_value_that_is_no_text_is_named():
    spoken = [{"from": "human", "value": ["Hi"]}]
    assert "turn 1 of `c` needs a string under `value`" in said(read_turns, spoken, "c")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "H"}, "i"]
    assert read_turns([{"role": "user", "content": parts}], "messages") == (USER,)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": "u"}, "image_url"),
        ({"type": "text"}, "text"),
        (7, "int"),
    ],
)
def test_other_parts_are_refused_by_name(part, kind):
    turns = [SYSTEM, {"role": "user", "content": [part]}]
    message = said(read_turns, turns, "messages", origin="f.jsonl:2")
    assert message.startswith("f.jsonl:2: turn 2 of `messages` needs a string under `content`")
    assert f"of the type `{kind}`" in message


def test_chats_may_stand_as_json_text():
    assert read_turns(json.dumps([USER]), "messages") == (USER,)
    assert read_turns(json.dumps(SPOKEN), "messages") == (USER, ASSISTANT)
    assert "must be a list of turns, got '[cut'" in said(read_turns, "[cut", "messages")


def test_conversations_stand_in_for_messages():
    raw = prompt_of(Record({"conversations": SPOKEN[:1], "id": 1}))
    assert raw.messages == (USER,)
    assert raw.metadata == {"id": 1}


def test_conversations_beside_a_prompt_are_metadata():
    raw = prompt_of(Record({"prompt": "p", "conversations": SPOKEN}))
    assert (raw.prompt, raw.metadata) == ("p", {"conversations": SPOKEN})


def test_last_answer_is_an_error_that_names_the_way_out():
    message = said(prompt_of, Record({"messages": [USER, ASSISTANT]}, "f:1"))
    assert "ends with a turn of role `assistant`" in message
    assert "`last_answer: drop`" in message


@pytest.mark.parametrize("record", [{"messages": [USER, ASSISTANT]}, {"conversations": SPOKEN}])
def test_last_answer_can_be_dropped_and_kept_for_the_rewards(record):
    raw = prompt_of(Record({**record, "id": 1}), last_answer="drop")
    assert raw.messages == (USER,)
    assert raw.metadata == {"id": 1, "reference_answer": "Hello"}


def test_dropping_leaves_chats_that_end_with_the_user_alone():
    raw = prompt_of(Record({"messages": [USER, ASSISTANT, USER]}), last_answer="drop")
    assert raw.messages == (USER, ASSISTANT, USER)
    assert raw.metadata == {}


def test_a_reference_answer_of_ones_own_is_not_overwritten():
    record = Record({"messages": [USER, ASSISTANT], "reference_answer": "mine"}, "f:1")
    assert "f:1: has a `reference_answer` of its own" in said(prompt_of, record, last_answer="drop")


@pytest.mark.parametrize("source", [JsonlPrompts, FilePrompts])
def test_every_source_takes_the_choice(tmp_path, source):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": [USER, ASSISTANT]}) + "\n")
    assert "assistant" in said(source(path).read)
    assert source(path, last_answer="drop").read()[0].metadata == {"reference_answer": "Hello"}
    listed = PromptList([{"messages": [USER, ASSISTANT]}], last_answer="drop")
    assert listed.read()[0].messages == (USER,)
    with pytest.raises(ValueError, match="`last_answer` must be one of error, drop, got 'cut'"):
        source(path, last_answer="cut")


def test_nul_characters_are_no_text():
    for record in ({"prompt": "a\0b"}, {"messages": [{"role": "user", "content": "\0"}]}):
        assert "f:1: holds a NUL character" in said(prompt_of, Record(record, "f:1"))


def test_both_keys_ask_for_a_choice_by_fields():
    record = Record({"prompt": "p", "messages": [USER]})
    assert "`fields: {messages: null}`" in said(prompt_of, record)


def test_a_near_key_is_offered():
    assert "`fields: {prompt: promt}`" in said(prompt_of, Record({"id": "x", "promt": "y"}))
