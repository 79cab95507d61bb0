"""Records that are pairs, and those that are none."""

import json

import pytest

from ppo_lightning.data import Record, as_records, preference_pair, read_pairs
from ppo_lightning.data.preferences.pairs import answer_completions
from ppo_lightning.errors import DataError


def pair(identical="error", **values):
    return preference_pair(Record(values, "pairs.jsonl:7"), identical=identical)


def said(text):
    return ({"role": "assistant", "content": text},)


def turn(role, content):
    return {"role": role, "content": content}


USER, BOT = turn("user", "hi"), turn("assistant", "hello")
MORE = turn("user", "and?")


def test_a_prompt_with_two_texts():
    found = pair(prompt="Q: ", chosen="yes", rejected="no", margin=2)
    assert (found.prompt, found.chosen, found.rejected) == ("Q: ", said("yes"), (said("no"),))
    assert (found.margin, found.origin) == (2.0, "pairs.jsonl:7")
    assert pair(prompt="Q", chosen="yes", rejected="no").margin == 0.0
    assert pair(prompt="Q", chosen="yes", rejected="no", margin="0.5").margin == 0.5  # of a CSV


def test_turns_before_the_answer_and_answers_as_text_turn_or_turns():
    expected = ((USER, BOT, MORE), said("a"), (said("b"),))
    for chosen in ("a", turn("assistant", "a"), [turn("assistant", "a")]):
        found = pair(messages=[USER, BOT, MORE], chosen=chosen, rejected="b")
        assert (found.prompt, found.chosen, found.rejected) == expected
    assert pair(prompt=[USER], chosen="a", rejected="b").prompt == (USER,)


def test_whole_chats_share_their_beginning():
    found = pair(
        chosen=[USER, BOT, MORE, turn("assistant", "a")],
        rejected=[USER, BOT, MORE, turn("assistant", "b")],
    )
    assert (found.prompt, found.chosen, found.rejected) == (
        (USER, BOT, MORE),
        said("a"),
        (said("b"),),
    )


def test_whole_chats_may_part_before_the_last_turn():
    found = pair(
        chosen=[USER, BOT, MORE, turn("assistant", "a")],
        rejected=[USER, turn("assistant", "go away"), MORE, turn("assistant", "a")],
    )
    assert found.prompt == (USER,)
    assert found.chosen == (BOT, MORE, turn("assistant", "a"))


def test_speakers_and_json_text_are_read_as_elsewhere():
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "a"}]
    found = pair(chosen=json.dumps(chat), rejected=[*chat[:1], {"from": "gpt", "value": "b"}])
    assert (found.prompt, found.chosen) == ((USER,), said("a"))
    assert pair(prompt="Q", chosen="[1] is right", rejected="[{ x").chosen == said("[1] is right")


def test_a_prompt_beside_answers_that_repeat_it():
    chats = {"chosen": [USER, turn("assistant", "a")], "rejected": [USER, turn("assistant", "b")]}
    for given in ({"prompt": "hi"}, {"messages": [USER]}):
        found = pair(**given, **chats)
        assert (found.prompt, found.chosen) == ((USER,), said("a"))


def test_several_rejected_answers():
    found = pair(prompt="Q", chosen="a", rejected=["b", "c"])
    assert found.rejected == (said("b"), said("c"))
    chats = [[turn("assistant", "b")], [turn("assistant", "c")]]
    assert pair(messages=[USER], chosen="a", rejected=chats).rejected == found.rejected
    whole = [[USER, *said("b")], [USER, *said("c")]]
    assert pair(chosen=[USER, *said("a")], rejected=whole).rejected == found.rejected


def test_identical_answers_are_an_error_or_left_out():
    with pytest.raises(DataError, match=r"pairs\.jsonl:7: .*same answer.*identical: drop"):
        pair(prompt="Q", chosen="a", rejected="a")
    assert pair("drop", prompt="Q", chosen="a", rejected=["a", "b"]).rejected == (said("b"),)
    assert pair("drop", prompt="Q", chosen="a", rejected="a").rejected == ()
    assert pair("drop", chosen=[USER, BOT], rejected=[USER, BOT]).rejected == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "Q", "chosen": "a"}, r"has no `rejected`; keys found: `prompt`, `chosen`"),
        ({"prompt": "Q", "choosen": "a", "rejected": "b"}, r"Did you mean `choosen`\?"),
        ({"chosen": "a", "rejected": "b"}, r"has no `prompt` or `messages`"),
        ({"prompt": "Q", "messages": [USER], "chosen": "a", "rejected": "b"}, "has both"),
        ({"prompt": "Q", "chosen": " ", "rejected": "b"}, "`chosen` is empty"),
        ({"prompt": "Q", "chosen": "a", "rejected": ""}, "`rejected` is empty"),
        ({"prompt": "Q", "chosen": "a", "rejected": []}, "empty list"),
        ({"prompt": "Q", "chosen": [], "rejected": "b"}, "empty list"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": "much"}, "must be a number"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": "nan"}, "finite"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": True}, "must be a number"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": -1}, "exchange the two"),
        ({"prompt": "Q", "chosen": "a", "rejected": "b", "margin": float("inf")}, "finite"),
        ({"prompt": "Q", "chosen": "\ud83d", "rejected": "b"}, "surrogate"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "`prompt` must be a string or a list"),
        ({"prompt": "Q", "chosen": 3, "rejected": "b"}, "`chosen` must be a string or a list"),
        ({"messages": [USER, BOT], "chosen": "a", "rejected": "b"}, "role `assistant`"),
        ({"messages": [turn("system", "s")], "chosen": "a", "rejected": "b"}, "no turn of role"),
        ({"messages": [USER], "chosen": [turn("bot", "a")], "rejected": "b"}, "unknown role"),
        ({"messages": [USER], "chosen": [MORE], "rejected": "b"}, "begins with a turn of role"),
        ({"messages": [USER], "chosen": [BOT, MORE], "rejected": "b"}, "ends with a turn of role"),
        (
            {"chosen": [USER, BOT], "rejected": [turn("user", "bye"), turn("assistant", "b")]},
            r"differ from turn 1 on \('hi' and 'bye'\).*one prompt",
        ),
        (
            {
                "chosen": [USER, BOT, MORE, turn("assistant", "a")],
                "rejected": [USER, BOT, turn("user", "so?"), turn("assistant", "a")],
            },
            r"turn 3 of `chosen` is the user's",
        ),
        (
            {"chosen": [USER, BOT, MORE, turn("assistant", "a")], "rejected": [USER, BOT]},
            "`rejected` ends after turn 2|turn 3 of `chosen` is the user's",
        ),
    ],
)
def test_what_is_no_pair_is_said_with_its_place(values, message):
    with pytest.raises(DataError, match=message) as caught:
        pair(**values)
    assert str(caught.value).startswith("pairs.jsonl:7: ")


def test_t04_bad_lines_come_in_one_report_by_file_and_line(tmp_path):
    lines = [
        '{"prompt": "Q", "chosen": "a", "rejected": "b"}',
        "",
        '{"prompt": "Q", "chosen": "a", "rejec',
        '{"prompt": "Q", "chosen": "a", "rejected": "a"}',
        '{"prompt": "Q", "chosen": "a"}',
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    with pytest.raises(DataError, match="3 of 4 records") as caught:
        read_pairs(as_records(str(file)))
    for number in (3, 4, 5):
        assert f"pairs.jsonl:{number}" in str(caught.value)
    source = as_records(str(file), on_error="skip")
    assert len(read_pairs(source)) == 1
    assert source.num_skipped == 3


def test_a_file_of_nothing_but_identical_pairs_is_an_error():
    records = [{"prompt": "Q", "chosen": "a", "rejected": "a"}]
    with pytest.raises(DataError, match="no pair that differs"):
        read_pairs(as_records(records), identical="drop")
    with pytest.raises(ValueError, match="`identical` must be one of"):
        read_pairs(as_records(records), identical="keep")


def test_fields_are_mapped():
    records = [{"question": "Q", "response_j": "a", "response_k": "b"}]
    names = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    (found,) = read_pairs(as_records(records, fields=names))
    assert (found.prompt, found.chosen) == ("Q", said("a"))


def test_pairs_of_one_prompt_share_a_key():
    plain = pair(prompt="hi", chosen="a", rejected="b")
    chat = pair(messages=[USER], chosen="c", rejected="d")
    other = pair(prompt="ho", chosen="a", rejected="b")
    assert plain.prompt_key == chat.prompt_key != other.prompt_key


def test_answers_are_shown_as_a_policys_would_be():
    shown = answer_completions("Q: ", [said("a"), (BOT, MORE, turn("assistant", "b"))])
    assert shown.prompts == ["Q: ", "Q: "]
    assert shown.messages == [None, (turn("user", "Q: "), BOT, MORE)]
    assert shown.responses == ["a", "b"]
    chat = answer_completions((USER, BOT, MORE), [said("a")])
    assert (chat.prompts, chat.messages) == (["and?"], [(USER, BOT, MORE)])


def test_what_follows_the_last_question_does_not_part_a_prompt_from_itself():
    tool = turn("tool", "42")
    plain = pair(messages=[USER], chosen="a", rejected="b")
    used = pair(messages=[USER, tool], chosen="a", rejected="b")
    assert plain.prompt_key == used.prompt_key
