"""The server, over real sockets, in this process."""

import json
import logging
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest
import torch

from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards import HTTPReward
from ppo_lightning.rewards.batching import BatchScorer
from ppo_lightning.rewards.serving import Limits, RewardServer, refuse_open_door, score_app
from tests.helpers.completions import Says, make_completions, numbers_in

CPU = torch.device("cpu")
TOKEN = "s3cr3t"


@contextmanager
def serving(component, *, token=None, limits=None, loaded=True, **options):
    """A server on a free port, and a client of it."""
    scorer = BatchScorer(component, name="judge", **options)
    app = score_app(scorer, token=token, limits=limits or Limits())
    server = RewardServer(app, host="127.0.0.1", port=0)
    server.start()
    if loaded:
        scorer.load(CPU)
    base = server.url.removesuffix("/score")
    with httpx.Client(base_url=base, trust_env=False, timeout=60) as client:
        client.server, client.scorer = server, scorer
        yield client
    server.stop(now=True)
    server.join()
    scorer.close()


def request_of(*responses):
    return {"version": 1, "items": [{"prompt": "p", "response": str(r)} for r in responses]}


def test_health_and_scores():
    with serving(Says(numbers_in)) as client:
        health = client.get("/health")
        assert health.status_code == 200
        said = health.json()
        assert (said["status"], said["model"], said["version"]) == ("ready", "judge", 1)
        answer = client.post("/score", json=request_of(1.5, -2))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {"version": 1, "scores": [1.5, -2.0]}


def test_loading_is_said_and_nothing_is_scored():
    with serving(Says(numbers_in), loaded=False) as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        answer = client.post("/score", json=request_of(1))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        client.scorer.load(CPU)
        assert client.post("/score", json=request_of(1)).json()["scores"] == [1.0]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
        (None, 401),
        ("", 401),
        (TOKEN, 401),
        (f"Basic {TOKEN}", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer schl\u00fcssel", 401),
    ],
)
def test_the_token_is_asked_for(given, status):
    with serving(Says(numbers_in), token=TOKEN) as client:
        assert client.get("/health").status_code == 200
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        answer = client.post("/score", json=request_of(1), headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert "bearer token" in answer.json()["error"]
            assert answer.headers["www-authenticate"] == "Bearer"
            assert TOKEN not in answer.text


def test_wrong_requests_are_told_what_is_wrong():
    with serving(Says(numbers_in), limits=Limits(max_items=2)) as client:
        for content, status, message in [
            (b"no", 400, "no JSON"),
            (json.dumps(request_of(1, 2, 3)).encode(), 413, "3 items, and 2 is the most"),
            (b'{"version": 1, "items": [{"prompt": "p"}]}', 422, "items[0].response"),
        ]:
            answer = client.post("/score", content=content)
            assert answer.status_code == status
            assert message in answer.json()["error"]
        assert client.post("/score", json=request_of(1)).json()["scores"] == [1.0]


def test_other_pages_and_methods():
    with serving(Says(numbers_in)) as client:
        for answer, status in [(client.get("/score"), 405), (client.post("/"), 404)]:
            assert answer.status_code == status
            assert "`POST /score`" in answer.json()["error"]


def raw(client, head, *parts):
    """Send bytes as they are, and return the status of the answer."""
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=60) as wire:
        wire.sendall(f"POST /score HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        for part in parts:
            wire.sendall(part)
        return int(wire.recv(65536).split(b" ")[1])


def test_long_bodies_are_refused_also_where_they_do_not_say_how_long_they_are():
    with serving(Says(numbers_in), limits=Limits(max_body_bytes=1000)) as client:
        chunk = b"200\r\n" + b" " * 512 + b"\r\n"
        assert raw(client, "Content-Length: 1001") == 413  # before any of it has come
        assert raw(client, f"Content-Length: {'9' * 18}") == 413
        assert raw(client, "Transfer-Encoding: chunked", chunk, chunk) == 413
        small = json.dumps(request_of(1)).encode()
        whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(small), small)
        assert raw(client, "Transfer-Encoding: chunked", whole) == 200


LONG = "x" * 4_000_000  # more than sockets hold


@pytest.mark.parametrize(
    ("server", "status"),
    [
        ({"token": TOKEN}, 401),
        ({"limits": Limits(max_body_bytes=1000)}, 413),
        ({"loaded": False}, 503),
    ],
)
def test_a_client_with_a_long_body_hears_why_it_is_refused(server, status):
    with serving(Says(numbers_in), **server) as client:
        reward = HTTPReward(client.server.url, health=None, retries=0)
        try:
            with pytest.raises(RewardError, match=f"answered {status}: "):
                reward(make_completions([LONG]))
        finally:
            reward.close()


def test_a_body_that_does_not_come_is_given_up():
    with serving(Says(numbers_in), limits=Limits(body_seconds=0.1)) as client:
        assert raw(client, "Content-Length: 100", b"{") == 408


def test_a_failing_model_is_500_without_its_secrets(caplog):
    def fails(completions):
        raise RuntimeError("/home/me/secret.bin is broken")

    with caplog.at_level(logging.ERROR), serving(Says(fails)) as client:
        answer = client.post("/score", json=request_of(1))
    assert answer.status_code == 500
    assert "the server's log" in answer.json()["error"]
    assert "secret" not in answer.text
    assert "/home/me/secret.bin" in caplog.text


def test_one_bad_item_fails_its_own_request_alone():
    """All three are in one batch."""
    together = threading.Barrier(3)
    found = {}

    with serving(Says(numbers_in), max_batch=3, max_wait=0.3) as client:

        def post(response):
            together.wait(timeout=60)
            found[response] = client.post("/score", json=request_of(response)).status_code

        threads = [threading.Thread(target=post, args=(r,)) for r in ("1", "x", "2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"1": 200, "x": 500, "2": 200}


def test_scores_that_are_none_are_null():
    with serving(Says([1.0, None])) as client:
        assert client.post("/score", json=request_of(1, 2)).json()["scores"] == [1.0, None]


def test_a_full_queue_says_when_to_come_again():
    with serving(Says(numbers_in)) as client:
        client.scorer.max_queue = 1
        answer = client.post("/score", json=request_of(1, 2))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_both_ends_together(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    count = 300
    with serving(Says(numbers_in), token=TOKEN) as client:
        reward = HTTPReward(
            client.server.url, batch_size=4, concurrency=32, token_env="REWARD_TOKEN"
        )
        reward.setup(CPU)
        found = reward(make_completions([str(i) for i in range(count)]))
        reward.close()
    assert found == [float(i) for i in range(count)]


def test_the_client_tells_what_the_server_refused():
    with serving(Says(numbers_in), token=TOKEN) as client:
        reward = HTTPReward(client.server.url)
        reward.setup(CPU)
        with pytest.raises(RewardError, match=r"answered 401: .*a valid bearer token.*`token_env`"):
            reward(make_completions(["1"]))
        reward.close()


def test_the_fingerprint_of_the_model_travels():
    judge = Says(numbers_in)
    judge.fingerprint = lambda: "abc"
    with serving(judge) as client:
        reward = HTTPReward(client.server.url)
        reward.setup(CPU)
        assert reward.fingerprint() == "abc"
        reward.close()


def test_a_client_that_goes_away_costs_nothing_more():
    busy, go = threading.Event(), threading.Event()

    def slow(completions):
        busy.set()
        assert go.wait(timeout=60)
        return numbers_in(completions)

    judge = Says(slow)
    with serving(judge, max_wait=0) as client:
        first = threading.Thread(
            target=client.post, args=("/score",), kwargs={"json": request_of(1)}
        )
        first.start()
        assert busy.wait(timeout=60)
        with socket.create_connection(("127.0.0.1", client.server.port)) as wire:
            body = json.dumps(request_of(2, 3)).encode()
            wire.sendall(
                b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            wire.sendall(body)
            while client.scorer.num_waiting == 0:
                threading.Event().wait(0.001)
        while client.scorer.num_waiting:
            threading.Event().wait(0.001)
        go.set()
        first.join()
        assert client.post("/score", json=request_of(4)).json()["scores"] == [4.0]
    assert [call.responses for call in judge.calls] == [["1"], ["4"]]


def test_addresses_that_cannot_be_used():
    app = score_app(BatchScorer(Says(None), name="judge"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, number in [("127.0.0.1", port), ("no-such-host.invalid", 0)]:
            told = f"`--host {host} --port {number}` cannot be used"
            with pytest.raises(ConfigError, match=told):
                RewardServer(app, host=host, port=number)
    with pytest.raises(ValueError, match=r"`--port` must lie in \[0, 65535\], got 70000"):
        RewardServer(app, host="127.0.0.1", port=70000)


def test_other_machines_need_a_token(capsys):
    refuse_open_door("127.0.0.1", token=None, insecure=False)
    refuse_open_door("0.0.0.0", token="t", insecure=False)
    with pytest.raises(ConfigError, match=r"`--host 0\.0\.0\.0` lets other machines in"):
        refuse_open_door("0.0.0.0", token=None, insecure=False)
    assert capsys.readouterr().err == ""
    refuse_open_door("0.0.0.0", token=None, insecure=True)
    assert "without a token" in capsys.readouterr().err
