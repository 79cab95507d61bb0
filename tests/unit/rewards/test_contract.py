"""Both ends of the contract read strictly."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_lightning.rewards.contract import (
    BadReply,
    BadRequest,
    Item,
    NoNumber,
    decode_request,
    decode_scores,
    encode_request,
    encode_scores,
    is_loopback,
)

ITEM = {"prompt": "p", "response": "r"}


def read(request, max_items=10):
    return decode_request(json.dumps(request).encode(), max_items=max_items)


def test_an_item_that_says_everything_and_one_that_says_little():
    chat = [{"role": "user", "content": "p"}]
    whole = {
        **{"prompt": "p", "response": "猫\U0001f600", "messages": chat, "truncated": True},
        **{"prompt_ids": [1], "response_ids": [2, 3], "metadata": {"answer": 4}},
    }
    assert read({"version": 1, "items": [whole, ITEM]}) == [
        Item(**(whole | {"messages": tuple(chat)})),
        Item(prompt="p", response="r"),
    ]
    assert read({"version": 1, "items": []}) == []


def test_what_a_client_writes_a_server_reads():
    sent = [{**ITEM, "response": "\x00 \u2028 \U0001f600", "messages": None, "truncated": False}]
    assert decode_request(encode_request(sent), max_items=1) == [
        Item(prompt="p", response="\x00 \u2028 \U0001f600")
    ]


@pytest.mark.parametrize("body", [b"", b"no", b"\xff", b'{"items": [NaN]}', b"[" * 100_000])
def test_what_is_no_json_is_400(body):
    with pytest.raises(BadRequest, match="no JSON") as caught:
        decode_request(body, max_items=1)
    assert caught.value.status == 400


def test_too_many_items_are_413():
    assert len(read({"version": 1, "items": [ITEM] * 3}, max_items=3)) == 3
    with pytest.raises(BadRequest, match="4 items, and 3 is the most") as caught:
        read({"version": 1, "items": [ITEM] * 4}, max_items=3)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "the body must be an object"),
        ({"items": []}, "speaks `version` 1, got none"),
        ({"version": 2, "items": []}, "speaks `version` 1, got 2"),
        ({"version": True, "items": []}, "speaks `version` 1, got true"),
        ({"version": 1}, "`items` must be a list, got null"),
        ({"version": 1, "items": {}}, "`items` must be a list, got {}"),
        (
            {"version": 1, "items": [], "itms": []},
            "unknown key `itms` in the request; did you mean",
        ),
        ({"version": 1, "items": [3]}, r"`items\[0\]` must be an object, got 3"),
    ],
)
def test_what_is_no_request_is_422(request_, message):
    with pytest.raises(BadRequest, match=message) as caught:
        read(request_)
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response": None}, r"`items\[1\].response` must be text, got null"),
        ({"prompt": 3}, r"`items\[1\].prompt` must be text, got 3"),
        ({"response": "\ud83d"}, "half of a surrogate pair"),
        ({"truncated": "no"}, "truncated` must be true or false"),
        ({"mesages": None}, "unknown key `mesages`.*did you mean `messages`"),
        ({"messages": []}, "must be null or turns of a chat"),
        ({"messages": "p"}, "must be null or turns of a chat"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]` must have `role` and `content`"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content` must be text"),
        ({"response_ids": [1, True]}, "must be a list of whole numbers"),
        ({"response_ids": "12"}, "must be a list of whole numbers"),
        ({"metadata": [1]}, "metadata` must be an object"),
    ],
)
def test_a_wrong_item_is_named_by_its_place(change, message):
    with pytest.raises(BadRequest, match=message) as caught:
        read({"version": 1, "items": [ITEM, ITEM | change]})
    assert caught.value.status == 422


def test_an_item_without_a_response_is_no_empty_response():
    with pytest.raises(BadRequest, match="response` must be text"):
        read({"version": 1, "items": [{"prompt": "p"}]})


def test_scores_that_are_not_finite_are_null():
    body = encode_scores([1.0, math.nan, math.inf, -0.5])
    assert json.loads(body) == {"version": 1, "scores": [1.0, None, None, -0.5]}
    assert decode_scores(body, 4) == [1.0, NoNumber("null"), NoNumber("null"), -0.5]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_scores_arrive_bit_for_bit(scores):
    assert decode_scores(encode_scores(scores), len(scores)) == scores


@given(st.binary(max_size=40), st.integers(0, 3))
def test_no_answer_becomes_a_number_by_accident(body, count):
    try:
        found = decode_scores(b'{"scores": [' + body + b"]}", count)
    except BadReply:
        return
    assert len(found) == count
    assert all(isinstance(x, NoNumber) or (type(x) is float and math.isfinite(x)) for x in found)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "[::1]"])
def test_this_machine(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "10.0.0.1", "localhost.org", ""])
def test_other_machines(host):
    assert not is_loopback(host)
