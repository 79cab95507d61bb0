"""The client in a process: threads, forks, signals, proxies."""

import multiprocessing
import os
import pickle
import signal
import threading
import warnings

import pytest
import torch

from ppo_lightning.errors import RewardError
from ppo_lightning.rewards import HTTPReward, scores_of
from tests.helpers.completions import make_completions
from tests.helpers.scripted_server import ScriptedServer, numbers, reply, says

CPU = torch.device("cpu")
TWO = make_completions(["1.5", "-2"])


def test_closed_and_used_again(serve):
    server, reward = serve(numbers)
    threads = threading.active_count()
    reward(TWO)
    reward.close()
    reward.close()
    # The scripted server has a thread for a connection, which ends with it.
    assert "reward-http" not in {thread.name for thread in threading.enumerate()}
    reward.setup(CPU)
    assert reward(TWO) == [1.5, -2.0]
    assert server.num_connections == 2
    assert threading.active_count() > threads


def test_nothing_is_opened_before_it_is_needed():
    before = threading.active_count()
    reward = HTTPReward("http://127.0.0.1:1")
    assert threading.active_count() == before
    assert reward._client is None


def test_copies_open_connections_of_their_own(serve):
    _, reward = serve(numbers)
    reward(TWO)
    copy = pickle.loads(pickle.dumps(reward))
    assert copy._client is None
    assert copy(TWO) == [1.5, -2.0]
    copy.close()


def _in_fork(reward, queue):
    queue.put(reward(TWO))
    reward.close()


def test_a_forked_process_asks_on_connections_of_its_own(serve):
    server, reward = serve(numbers)
    assert reward(TWO) == [1.5, -2.0]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_fork, args=(reward, queue))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        child.start()
    assert queue.get() == [1.5, -2.0]
    child.join()
    assert child.exitcode == 0
    assert reward(TWO) == [1.5, -2.0]
    assert server.num_connections == 2


def test_several_threads_may_ask(serve):
    _, reward = serve(numbers, batch_size=1)
    found = {}

    def ask(i):
        found[i] = reward(make_completions([str(i), str(-i)]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: [float(i), float(-i)] for i in range(8)}


def in_thread(call, *arguments):
    """Call something in a thread of its own; what it returns is put into the list."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*arguments)), daemon=True)
    thread.start()
    return thread, found


def names_of_threads():
    return [thread.name for thread in threading.enumerate()]


def test_whoever_waits_for_an_answer_gets_it_though_another_thread_closes(serve):
    asked, closed = threading.Event(), threading.Event()

    def late(wire, request):
        asked.set()
        assert closed.wait(timeout=60)
        return numbers(wire, request)

    server, reward = serve(late, numbers)
    thread, found = in_thread(reward, TWO)
    assert asked.wait(timeout=60)
    reward.close()
    assert reward(TWO) == [1.5, -2.0]  # on connections of its own
    reward.close()
    assert names_of_threads().count("reward-http") == 1
    closed.set()
    thread.join()
    assert found == [[1.5, -2.0]]
    assert "reward-http" not in names_of_threads()
    assert server.num_connections == 2
    assert not reward._asking


def test_several_threads_may_set_up_and_all_wait_for_the_server(serve, monkeypatch):
    server, reward = serve(numbers)
    reward.health, others, early = "/health", [], []

    def ready(request):
        server.num_health += 1
        others.append(in_thread(reward.setup, CPU))
        [(thread, returned)] = others
        thread.join(timeout=0.2)  # it has the time to come back too early
        early.extend(returned)
        return says(server.health)

    monkeypatch.setattr(server, "_next", ready)
    reward.setup(CPU)
    [(thread, returned)] = others
    thread.join()
    assert not early
    assert returned == [None]
    assert names_of_threads().count("reward-http") == 1
    assert server.num_health == 1


def test_closed_by_another_thread_while_it_is_set_up(serve, monkeypatch):
    said = reply(b'{"status": "ready", "fingerprint": "abc"}')
    server, reward = serve(numbers, health=said)
    reward.health = "/health"

    def closes(request):
        reward.close()
        return says(said)

    monkeypatch.setattr(server, "_next", closes)
    reward.setup(CPU)
    assert reward.fingerprint() == ""
    assert "reward-http" not in names_of_threads()


def test_ctrl_c_ends_the_waiting_and_closes_the_connection(serve):
    closed = threading.Event()

    def interrupt(wire, request):
        os.kill(os.getpid(), signal.SIGINT)
        wire.until_closed()
        closed.set()
        return False

    # Processes that pytest-xdist starts ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _, reward = serve(interrupt)
        with pytest.raises(KeyboardInterrupt):
            reward(TWO)
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed.wait(timeout=60)


def test_sigterm_is_heard_while_waiting(serve):
    heard = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: heard.set())

    def terminate(wire, request):
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(timeout=60)
        return numbers(wire, request)

    try:
        _, reward = serve(terminate)
        assert reward(TWO) == [1.5, -2.0]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_proxies_are_not_asked_about_this_machine(serve, monkeypatch):
    with ScriptedServer(numbers) as gone:
        dead = f"http://127.0.0.1:{gone.port}"
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, dead)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server, reward = serve(numbers)
    assert reward(TWO) == [1.5, -2.0]
    by_name = HTTPReward(f"http://localhost:{server.port}", health=None, retries=0)
    assert by_name(TWO) == [1.5, -2.0]
    by_name.close()


def test_proxies_are_asked_about_other_machines(serve, monkeypatch):
    server, _ = serve(numbers)
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    far = HTTPReward("http://rewards.invalid/score", health=None, retries=0)
    assert far(TWO) == [1.5, -2.0]
    far.close()
    assert server.requests[0].path == "http://rewards.invalid/score"
    near = HTTPReward("http://rewards.invalid/score", health=None, retries=0, trust_env=False)
    with pytest.raises(RewardError, match="could not be asked: ConnectError"):
        scores_of(near, "judge", TWO)
    near.close()


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "gopher://127.0.0.1:1")
    far = HTTPReward("http://rewards.invalid/score", health=None, concurrency=1)
    for _ in range(2):  # the second would wait for ever if the first kept its place
        with pytest.raises(RewardError, match=r"through the proxy .*gopher.*`trust_env: false`"):
            scores_of(far, "judge", TWO)
    far.close()
