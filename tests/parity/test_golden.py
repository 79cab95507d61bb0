"""Every case of every golden file, in float64 and, where the case allows it, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.parity.golden_loss_checks  # noqa: F401  (registers its checks)
from tests.parity.golden_checks import CHECKS, NOT_COMPUTED, Case

FILES = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in Path(__file__).parent.glob("golden/*.json")
}
# By hand, so that a file that is lost, or a case dropped from one, shows.
NUM_CASES = {
    "adaptive_beta": 3,
    "adaptive_kl_controller": 4,
    "entropy": 5,
    "explained_variance": 5,
    "gae": 14,
    "gae_gap": 3,
    "kl_full": 5,
    "kl_penalty": 6,
    "logprobs": 5,
    "lr_schedule": 6,
    "pipeline": 3,
    "policy_accumulation": 3,
    "policy_loss": 11,
    "ppo_penalty": 4,
    "ptx": 4,
    "response_mask": 5,
    "reward_ema": 3,
    "reward_running": 3,
    "reward_zscore": 6,
    "token_rewards": 11,
    "value_loss": 6,
    "whiten": 7,
    "whiten_shards": 3,
}
FLOAT32_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def _runs() -> list[Any]:
    return [
        pytest.param(topic, raw, dtype, id=f"{topic}-{raw['case']}-{str(dtype)[6:]}")
        for topic, content in sorted(FILES.items())
        for raw in content["cases"]
        for dtype in (torch.float64, torch.float32)
        if dtype == torch.float64 or raw["float32_ok"]
    ]


@pytest.mark.parametrize(("topic", "raw", "dtype"), _runs())
def test_golden(topic: str, raw: dict[str, Any], dtype: torch.dtype):
    tolerance = raw["tolerance"] if dtype == torch.float64 else _wider(raw["tolerance"])
    case = Case(raw["inputs"], raw["expected"], dtype, **tolerance)
    CHECKS[topic](case)
    assert case.compared | NOT_COMPUTED.get(topic, set()) >= set(raw["expected"])
    assert not case.compared & NOT_COMPUTED.get(topic, set())


def _wider(tolerance: dict[str, float]) -> dict[str, float]:
    return {key: max(tolerance[key], FLOAT32_TOLERANCE[key]) for key in FLOAT32_TOLERANCE}


def test_no_file_and_no_case_is_left_out():
    assert {topic: len(content["cases"]) for topic, content in FILES.items()} == NUM_CASES
    assert set(CHECKS) == set(NUM_CASES)
    there = {(topic, raw["case"]) for topic, content in FILES.items() for raw in content["cases"]}
    run = [(p.values[0], p.values[1]["case"]) for p in _runs() if p.values[2] == torch.float64]
    assert sorted(run) == sorted(there)
    assert len(run) == sum(NUM_CASES.values())


@pytest.mark.parametrize("topic", sorted(FILES))
def test_a_wrong_number_is_noticed(topic: str):
    """Each comparison can fail: it does when its own key, and no other, is moved."""
    for raw in FILES[topic]["cases"]:
        for key in set(raw["expected"]) - NOT_COMPUTED.get(topic, set()):
            expected = raw["expected"] | {key: _moved(raw["expected"][key])}
            case = Case(raw["inputs"], expected, torch.float64, **raw["tolerance"])
            with pytest.raises(AssertionError, match=key):
                CHECKS[topic](case)


def _moved(expected: Any) -> Any:
    if isinstance(expected, dict):
        return {key: _moved(value) for key, value in expected.items()}
    if isinstance(expected, list):
        return [_moved(value) for value in expected]
    return 0.5 if expected is None else expected + 0.5 + abs(expected)
