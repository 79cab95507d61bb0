"""Other tries, and the wait for a server: every delay is counted, none is slept."""

import json

import pytest

from ppo_lightning.rewards.http_client import ScoreClient
from ppo_lightning.rewards.http_connections import Trouble
from ppo_lightning.rewards.http_requests import Request
from ppo_lightning.rewards.http_settings import ClientSettings
from tests.helpers.scripted_server import (
    ScriptedServer,
    body,
    half,
    numbers,
    reply,
    reset,
    silence,
)


class Nap:
    """Counts what would have been slept."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


def client_of(server, nap, *, jitter=1.0, clock=lambda: 0.0, **options):
    settings = {
        "url": server.url,
        "timeout": 30.0,
        "connect_timeout": 5.0,
        "retries": 3,
        "backoff": 1.0,
        "max_backoff": 20.0,
        "concurrency": 1,
        "retry_on": (429, 502, 503, 504),
        "trust_env": True,
        "max_reply_bytes": 10_000,
    }
    return ScoreClient(
        ClientSettings(**(settings | options)), sleep=nap, clock=clock, jitter=lambda: jitter
    )


def asked(*script, requests=1, stop=True, **options):
    """Ask a server with this script: what came of it, what was slept, how many requests it got."""
    nap = Nap()
    with ScriptedServer(*script) as server:
        client = client_of(server, nap, **options)
        item = [{"response": "7"}]
        sent = json.dumps({"items": item}).encode()
        wanted = [Request(body=sent, count=1, start=i) for i in range(requests)]
        try:
            outcomes = client.ask(wanted, stop_at_trouble=stop)
        finally:
            client.close()
        return outcomes, nap.seconds, len(server.requests)


@pytest.mark.parametrize(
    "fault",
    [reset, half, *(body("", status=status) for status in (429, 502, 503, 504))],
)
def test_retries_then_success(fault):
    outcomes, slept, count = asked(fault, fault, numbers)
    assert outcomes == [[7.0]]
    assert slept == [1.0, 2.0]
    assert count == 3


def test_silence_is_tried_again():
    # Tries enough that on a busy machine one is in time; the first never is.
    outcomes, _, count = asked(silence, numbers, timeout=0.2, retries=200)
    assert outcomes == [[7.0]]
    assert count >= 2


def test_retries_end():
    (outcome,), slept, count = asked(body("", status=503))
    assert isinstance(outcome, Trouble)
    assert outcome.what.endswith("(the last of 4 tries)")
    assert slept == [1.0, 2.0, 4.0]
    assert count == 4


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 500, 501])
def test_statuses_that_no_retry_mends(status):
    (outcome,), slept, count = asked(body("", status=status), numbers)
    assert isinstance(outcome, Trouble)
    assert (slept, count) == ([], 1)


def test_500_is_tried_again_where_so_configured():
    outcomes, _, count = asked(body("", status=500), numbers, retry_on=(500,))
    assert (outcomes, count) == ([[7.0]], 2)


def test_an_answer_that_is_no_reward_is_not_asked_for_again():
    (outcome,), _, count = asked(body("nonsense"), numbers)
    assert isinstance(outcome, Trouble)
    assert count == 1


def test_the_server_says_how_long_to_wait():
    for said, waited in [("3", 3.0), ("0", 0.0), ("999999", 20.0), ("soon", 1.0), ("-5", 1.0)]:
        _, slept, _ = asked(body("", status=429, Retry_After=said), numbers)
        assert slept == [waited], said
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    assert asked(body("", status=503, Retry_After=past), numbers)[1] == [0.0]
    assert asked(body("", status=503, Retry_After=past.replace("2015", "2999")), numbers)[1] == [20]


def test_half_of_a_delay_is_drawn_and_all_of_it_bounded():
    fault = body("", status=503)
    assert asked(fault, fault, numbers, jitter=0.0)[1] == [0.5, 1.0]
    assert asked(fault, jitter=0.5, retries=7)[1] == [0.75, 1.5, 3.0, 6.0, 12.0, 15.0, 15.0]


def test_where_all_tries_were_in_vain_the_next_requests_get_one_each():
    outcomes, slept, count = asked(body("", status=503), requests=5, stop=False)
    assert all(isinstance(outcome, Trouble) for outcome in outcomes)
    assert count == 4 + 4
    assert len(slept) == 3


def test_the_first_failure_gives_the_rest_up():
    outcomes, _, count = asked(body("", status=500), requests=5)
    assert [outcome is None for outcome in outcomes] == [False, True, True, True, True]
    assert count == 1


# Health


def test_setup_waits_until_the_server_is_ready(caplog):
    nap, ready = Nap(), {"status": "ready", "fingerprint": "abc"}
    with ScriptedServer(numbers, health=reply(b'{"status": "loading"}', 503)) as server:
        client = client_of(server, nap)
        original = server._next

        def later(request):
            if server.num_health == 2:
                server.health = reply(json.dumps(ready).encode())
            return original(request)

        server._next = later
        assert client.health("/health", within=100.0) == ready
        client.close()
    assert nap.seconds == [1.0, 2.0]
    assert caplog.text.count("Waiting 100 s at most for the reward server") == 1


def test_setup_does_not_wait_for_ever():
    times = iter([0.0, 5.0, 10.0])
    with ScriptedServer(numbers, health=reply(b'{"status": "loading"}', 503)) as server:
        client = client_of(server, Nap(), clock=lambda: next(times))
        with pytest.raises(Trouble, match=r"503.*loading"):
            client.health("/health", within=10.0)
        client.close()
    assert server.num_health == 2
