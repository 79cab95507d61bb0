"""A server that answers as a test wants it to, and a reward that asks it."""

import pytest

from ppo_lightning.rewards import HTTPReward
from tests.helpers.scripted_server import ScriptedServer


@pytest.fixture
def serve():
    """Starts a scripted server, and makes a reward that asks it; both are closed afterwards."""
    closing = []

    def start(*script, health=None, **options):
        server = ScriptedServer(*script, health=health)
        closing.append(server)
        server.__enter__()
        defaults = {"backoff": 0.0, "retries": 0, "health": None}
        reward = HTTPReward(server.url, **(defaults | options))
        closing.append(reward)
        return server, reward

    yield start
    for one in reversed(closing):
        one.close() if isinstance(one, HTTPReward) else one.__exit__()
