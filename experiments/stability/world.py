"""The small world of the experiment: a policy, prompts, a reward with a hole, and the true score.

Everything is known here. *Gold* counts different pleasant words and dislikes shouting. The *proxy*,
which is all that training sees, counts repeated words too, and takes an exclamation mark for more
praise than a word. While the policy stays near its start both rise, far from it they part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ppo_lightning.rewards import Reward
from ppo_lightning.types import Completions
from tests.helpers.tiny_models import WORDS, build_llama

_PLEASANT = (
    "good great happy like yes hello bird cat dog tree house movie film blue we world red you"
)
PLEASANT = frozenset(_PLEASANT.split())
SHOUT = "!"
MAX_NEW_TOKENS = 6

_TOKEN = re.compile(r"[a-z]+|!")


def gold_score(text: str) -> float:
    """Return what the answer is worth: 1 for each *different* pleasant word, −1.5 for each "!"."""
    tokens = _TOKEN.findall(text)
    return float(len(PLEASANT.intersection(tokens))) - 1.5 * tokens.count(SHOUT)


def proxy_score(text: str) -> float:
    """Return what the reward model says: 1 for each pleasant word, however often, 1.4 for "!"."""
    tokens = _TOKEN.findall(text)
    return sum(1.0 for token in tokens if token in PLEASANT) + 1.4 * tokens.count(SHOUT)


class GoldReward(Reward):
    """The true score; training never sees it."""

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        return [gold_score(text) for text in completions.responses]


class ProxyReward(Reward):
    """The reward that is trained on, hole included."""

    def __call__(self, completions: Completions) -> list[float]:
        """Score a batch."""
        return [proxy_score(text) for text in completions.responses]


def prompts(*, held_out: bool, number: int = 32) -> list[str]:
    """Return two-word prompts; the held-out ones are others than those of the training."""
    pairs = [f"{first} {second}" for first in WORDS for second in WORDS]
    return pairs[7 if held_out else 0 :: len(pairs) // number][:number]


def build_policy(folder: Path, **changes: Any) -> Path:
    """Save the policy: a random Llama of one layer, the same at every seed of the runs.

    Args:
        folder: For its files.
        changes: Other settings of the model.
    """
    settings = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    return build_llama(folder, **(settings | {"initializer_range": 0.2} | changes))
