"""The client: what it sends, and what becomes of answers that are no rewards."""

import json
import logging
import math
import threading

import pytest
import torch

from ppo_lightning.configs import RewardProcessing
from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards import HTTPReward, RewardPipeline, RewardTerm, scores_of
from tests.helpers.completions import make_completions
from tests.helpers.scripted_server import (
    ScriptedServer,
    body,
    drip,
    half,
    numbers,
    reply,
    reset,
    says,
    scores,
    silence,
)

CPU = torch.device("cpu")
TWO = make_completions(["1.5", "-2"], prompts=["first", "second"])
TOKEN = "s3cr3t-token-abc"


def error_of(reward, completions=TWO, name="judge"):
    with pytest.raises(RewardError) as caught:
        scores_of(reward, name, completions)
    return caught.value


# What is sent, and the good answer


def test_scores_come_back_in_order(serve):
    server, reward = serve(numbers)
    assert scores_of(reward, "judge", TWO).tolist() == [1.5, -2.0]
    assert len(server.requests) == 1


def test_what_is_sent(serve):
    chat = ({"role": "user", "content": "wer? 猫"},)
    completions = make_completions(
        ["1", "2"], prompts=["p", "wer? 猫"], messages=[None, chat], truncated=[False, True]
    )
    server, reward = serve(numbers)
    reward(completions)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/score")
    assert request.headers["content-type"] == "application/json"
    assert "authorization" not in request.headers
    assert json.loads(request.body) == {
        "version": 1,
        "items": [
            {"prompt": "p", "messages": None, "response": "1", "truncated": False},
            {"prompt": "wer? 猫", "messages": list(chat), "response": "2", "truncated": True},
        ],
    }


def test_fields_and_metadata_on_request(serve):
    record = {"answer": 4, "rate": math.nan, "tensor": torch.ones(2), "tags": ["a"]}
    completions = make_completions(["1"], metadata=[record], response_ids=[torch.tensor([5, 6])])
    server, reward = serve(numbers, fields=["response", "response_ids"], send_metadata=True)
    reward(completions)
    assert server.requests[0].items == [
        {"response": "1", "response_ids": [5, 6], "metadata": {"answer": 4, "tags": ["a"]}}
    ]


def test_chosen_metadata(serve):
    completions = make_completions(["1"], metadata=[{"answer": 4, "rate": math.nan}])
    server, reward = serve(numbers, send_metadata=["answer"])
    reward(completions)
    assert server.requests[0].items[0]["metadata"] == {"answer": 4}
    for keys, message in [(["answr"], "did you mean `answer`"), (["rate"], "no form in JSON")]:
        _, reward = serve(numbers, send_metadata=keys)
        error = error_of(reward, completions)
        assert message in str(error)
        assert error.sample == 0


def test_batches_are_split_and_put_together_with_32_in_flight(serve):
    """The server answers nobody before all 32 are there, and the last ones first."""
    together, answered = threading.Barrier(32), threading.Condition()
    done = []

    def backwards(wire, request):
        number = int(request.items[0]["response"]) // 2
        together.wait(timeout=60)
        with answered:
            turn = number // 32 * 32 + 31 - number % 32
            answered.wait_for(
                lambda: len([n for n in done if n // 32 == number // 32]) == turn % 32
            )
            done.append(number)
            answered.notify_all()
        return numbers(wire, request)

    count = 128  # 64 requests of two
    server, reward = serve(backwards, batch_size=2, concurrency=32)
    found = reward(make_completions([str(i) for i in range(count)]))
    assert found == [float(i) for i in range(count)]
    assert server.num_connections == 32
    assert len(server.requests) == 64


def test_an_odd_rest_is_a_batch_of_its_own(serve):
    server, reward = serve(numbers, batch_size=3)
    assert reward(make_completions(["1", "2", "3", "4"])) == [1.0, 2.0, 3.0, 4.0]
    assert sorted(len(request.items) for request in server.requests) == [1, 3]


def test_connections_are_kept_from_call_to_call(serve):
    server, reward = serve(numbers, concurrency=1, batch_size=1)
    for _ in range(3):
        reward(TWO)
    assert len(server.requests) == 6
    assert server.num_connections == 1


def test_a_connection_that_the_server_closed_meanwhile_is_opened_anew(serve):
    def once(wire, request):
        numbers(wire, request)
        return False

    _, reward = serve(once, retries=1, concurrency=1, batch_size=1)
    assert reward(TWO) == [1.5, -2.0]
    assert reward(TWO) == [1.5, -2.0]


# Trap T30: answers that are no rewards


@pytest.mark.parametrize(
    ("behaviour", "received"),
    [
        (body('{"scores": [0.5, 0.25]}', status=500), "answered 500: '{\"scores\": [0.5, 0.25]}'"),
        (body('{"scores": [0.5]}'), "with 1 score, expected 2"),
        (body('{"scores": [0.5, 1, 2]}'), "with 3 scores, expected 2"),
        (body('{"scores": []}'), "with 0 scores, expected 2"),
        (body("<html>hello</html>"), "'<html>hello</html>' (application/json), which is no JSON"),
        (body(""), "answered nothing (application/json), which is no JSON"),
        (body("[0.5, 0.25]"), 'without a list of `"scores"`'),
        (body('{"score": [0.5, 0.25]}'), 'without a list of `"scores"`'),
        (body('{"scores": {"0": 0.5, "1": 1}}'), 'without a list of `"scores"`'),
        (body('{"scores": 0.5}'), 'without a list of `"scores"`'),
        (body("[" * 100_000), "which is no JSON"),
        (says(reply(b"\xff\xfe{}")), "which is no JSON"),
        (body("busy", status=503), "answered 503: 'busy'. Prompt"),
        (half, "could not be asked: RemoteProtocolError"),
        (reset, "could not be asked: "),
        (says(b"SSH-2.0-OpenSSH_9.6\r\n", stays=False), "could not be asked: RemoteProtocolError"),
        (body("", status=204), "answered 204: nothing"),
        (body('{"scores": [0.5, 1]}', Content_Encoding="gzip"), "sent a compressed answer"),
    ],
)
def test_t30_answers_without_scores_are_errors_with_everything_named(serve, behaviour, received):
    server, reward = serve(behaviour)
    error = error_of(reward)
    assert received in str(error)
    assert str(error).startswith(f"reward `judge`, sample 0: the reward server `{server.url}` ")
    assert "Prompt: 'first', response: '1.5'." in str(error)
    assert "`on_failure: missing`" in str(error)
    assert error.sample == 0
    assert len(str(error)) < 900


NO_NUMBERS = [
    "null",
    '"nan"',
    '"0.5"',
    "true",
    "NaN",
    "-Infinity",
    "[0.25]",
    "{}",
    "1e400",
    "9" * 400,
]


@pytest.mark.parametrize("entry", NO_NUMBERS)
def test_t30_an_entry_that_is_no_number_is_an_error_with_its_sample(serve, entry):
    server, reward = serve(body(f'{{"scores": [0.5, {entry}]}}'))
    error = error_of(reward)
    assert error.sample == 1
    assert "where a number belongs" in str(error)
    assert server.url in str(error)
    assert "Prompt: 'second'" in str(error)
    if len(entry) < 20 and "e400" not in entry:
        assert f"answered {entry} where" in str(error)


@pytest.mark.parametrize("entry", NO_NUMBERS)
def test_t30_an_entry_that_is_no_number_can_be_missing(serve, entry):
    _, reward = serve(body(f'{{"scores": [0.5, {entry}]}}'), on_failure="missing")
    found = scores_of(reward, "judge", TWO, on_nonfinite="drop")
    assert found[0] == 0.5
    assert found[1].isnan()


@pytest.mark.parametrize(
    "behaviour",
    [
        body('{"scores": [0.5, 0.25]}', status=500),
        body('{"scores": [0.5]}'),
        body("no"),
        half,
        reset,
        body("{}", status=422),
    ],
)
def test_t30_missing_scores_are_dropped_and_counted_never_zero(serve, behaviour, caplog):
    server, reward = serve(behaviour, numbers, batch_size=2, concurrency=1, on_failure="missing")
    four = make_completions(["1", "2", "3", "4"])
    pipeline = RewardPipeline(
        [RewardTerm(name="judge", component=reward)], RewardProcessing(on_nonfinite="drop")
    )
    with caplog.at_level(logging.WARNING):
        result = pipeline(four)
    assert result.dropped.tolist() == [True, True, False, False]
    assert result.raw[:2].isnan().all()
    assert result.raw[2:].tolist() == [3.0, 4.0]
    assert "2 of 4 responses have no score. The first, sample 0: the reward server" in caplog.text
    assert server.url in caplog.text


def test_t30_what_is_missing_is_still_an_error_where_nothing_drops_it(serve):
    _, reward = serve(scores(0.5, None), on_failure="missing")
    assert error_of(reward).sample == 1


def test_the_sample_is_that_of_the_request_that_failed(serve):
    def third(wire, request):
        bad = request.items[0]["response"] == "2"
        return (body("broken", status=500) if bad else silence)(wire, request)

    _, reward = serve(third, batch_size=1, concurrency=4)
    error = error_of(reward, make_completions(["0", "1", "2", "3"]))
    assert error.sample == 2
    assert "'broken'" in str(error)


def test_booleans_and_whole_numbers_are_told_apart(serve):
    _, reward = serve(scores(1, 2))
    assert reward(TWO) == [1.0, 2.0]


# Deadlines and sizes


@pytest.mark.parametrize("of_head", [True, False], ids=["head", "body"])
def test_a_slow_drip_does_not_defeat_the_deadline(serve, of_head):
    """Each byte comes well within the time; the whole answer is worth nothing after it."""
    _, reward = serve(drip(0.05, of_head=of_head), timeout=0.3)
    assert "gave no complete answer within 0.3 s" in str(error_of(reward))


def test_silence_ends_with_the_deadline(serve):
    _, reward = serve(silence, timeout=0.1)
    assert "gave no complete answer within 0.1 s" in str(error_of(reward))


def test_a_huge_answer_is_not_read(serve):
    def endless(wire, request):
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while True:
            wire.send(b"x" * 65536)

    _, reward = serve(endless, max_reply_bytes=100_000)
    error = str(error_of(reward))
    assert "answered 200 with more than 100000 bytes, beginning 'xxx" in error
    assert "`max_reply_bytes`" in error


def test_nobody_listens():
    with ScriptedServer(numbers) as server:
        url = server.url
    reward = HTTPReward(url, health=None, retries=0)
    error = str(error_of(reward))
    reward.close()
    assert "could not be asked: ConnectError" in error
    assert "Is the server running there?" in error


# Statuses that mean a wrong setting


@pytest.mark.parametrize("status", [401, 403, 404, 405])
@pytest.mark.parametrize("on_failure", ["error", "missing"])
def test_a_wrong_page_or_token_is_an_error_always_and_never_tried_again(serve, status, on_failure):
    server, reward = serve(body("no", status=status), retries=5, on_failure=on_failure)
    error = str(error_of(reward))
    assert f"answered {status}: 'no'" in error
    assert ("token_env" in error) == (status in (401, 403))
    assert "on_failure: missing" not in error  # which would not help
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_refused_is_not_tried_again(serve, status):
    server, reward = serve(body("no", status=status), retries=5)
    assert f"answered {status}" in str(error_of(reward))
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(serve, monkeypatch, status):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    elsewhere, _ = serve(numbers)
    place = f"http://user:pw@127.0.0.1:{elsewhere.port}/other?key=hidden"
    _, reward = serve(body("", status=status, Location=place), token_env="REWARD_TOKEN", retries=3)
    error = str(error_of(reward))
    assert f"http://127.0.0.1:{elsewhere.port}/other?…" in error
    assert "pw" not in error.replace("powered", "")
    assert "hidden" not in error
    assert elsewhere.requests == []


# The token


@pytest.mark.parametrize("before", [0, 90], ids=["within the excerpt", "across its end"])
def test_the_token_is_sent_and_never_told(serve, monkeypatch, caplog, before):
    monkeypatch.setenv("REWARD_TOKEN", f" {TOKEN}\n")

    def echo(wire, request):
        said = f"you sent {'x' * before} {request.headers['authorization']} and more".encode()
        wire.send(reply(said, status=500))
        return True

    server, reward = serve(echo, token_env="REWARD_TOKEN")
    with caplog.at_level(logging.DEBUG):
        error = error_of(reward)
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN[:6] not in str(error)
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(vars(reward))
    assert TOKEN not in repr(reward._settings())


def test_a_token_that_is_not_there_or_none(monkeypatch):
    reward = HTTPReward("http://127.0.0.1:1/", token_env="REWARD_TOKEN")
    for value in ("", " \n", None, "two words", "line\nbreak", "schlüssel"):
        monkeypatch.setenv("REWARD_TOKEN", value or "")
        if value is None:
            monkeypatch.delenv("REWARD_TOKEN")
        with pytest.raises(ConfigError, match=r"`token_env`: .*`REWARD_TOKEN`") as caught:
            reward.setup(CPU)
        assert value is None or not value.strip() or value not in str(caught.value)


# Settings


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://host/x", "http://", "http://host:port/", "//host/x"]
)
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="`url` must be like"):
        HTTPReward(url)


@pytest.mark.parametrize("url", ["http://me:pw123@host/score", "me:pw123@host"])
def test_passwords_in_the_address_are_refused_without_telling_them(url):
    with pytest.raises(ConfigError, match="`url` must") as caught:
        HTTPReward(url)
    assert "pw123" not in str(caught.value)


def test_the_page_is_score_unless_named():
    assert HTTPReward("http://host:1").url == "http://host:1/score"
    assert HTTPReward("http://host:1/").url == "http://host:1/score"
    assert HTTPReward(" https://host/a/b?c=d#e ").url == "https://host/a/b?c=d"


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": math.inf},
        {"connect_timeout": -1},
        {"retries": -1},
        {"backoff": -0.1},
        {"max_backoff": 0},
        {"batch_size": 0},
        {"concurrency": 0},
        {"max_reply_bytes": 0},
        {"startup_timeout": -1},
        {"retry_on": [404]},
        {"fields": ["prompt"]},
        {"fields": ["response", "text"]},
        {"health": "health"},
        {"health": "http://elsewhere/health"},
        {"on_failure": "zero"},
    ],
)
def test_settings_that_cannot_be(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        HTTPReward("http://host", **options)


# Another try


def test_drawing_leaves_the_random_numbers_of_the_run_alone(serve):
    import random

    random.seed(0)
    before = random.getstate(), torch.get_rng_state()
    _, reward = serve(body("", status=503), numbers, retries=1)
    reward(TWO)
    assert random.getstate() == before[0]
    assert torch.get_rng_state().equal(before[1])


# Health


def test_setup_asks_the_server_once_and_keeps_its_fingerprint(serve):
    said = reply(b'{"status": "ready", "version": 1, "fingerprint": "abc"}')
    server, reward = serve(numbers, health=said)
    reward.health = "/health"
    assert reward.fingerprint() == ""
    reward.setup(CPU)
    reward.setup(CPU)
    assert server.num_health == 1
    assert reward.fingerprint() == "abc"
    assert reward(TWO) == [1.5, -2.0]
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (reply(b"", 404), r"has no page /health .*answered 404.* or to null for none"),
        (reply(b"", 401), "answered 401.*token_env"),
        (reply(b'{"version": 2}'), "speaks version 2 of the contract"),
        (reply(b'{"status": "loading"}'), "is still 'loading'"),
    ],
)
def test_servers_that_are_not_ready(serve, health, message):
    _, reward = serve(numbers, health=health, startup_timeout=0.0)
    reward.health = "/health"
    pipeline = RewardPipeline([RewardTerm(name="judge", component=reward)])
    with pytest.raises(RewardError, match=f"reward `judge`: the reward server .*{message}"):
        pipeline.setup(CPU)
    assert reward._client is None


def test_any_page_that_answers_will_do_as_health(serve):
    _, reward = serve(numbers, health=reply(b"OK"))
    reward.health = "/health"
    reward.setup(CPU)
    assert reward.fingerprint() == ""
