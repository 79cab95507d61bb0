"""How old the responses of a run may be."""

import pytest

from ppo_lightning.configs import StalenessConfig
from ppo_lightning.modules.staleness import allowed_lag
from ppo_lightning.rollout import AsyncEngine, NativeEngine


@pytest.mark.parametrize(("ahead", "max_lag", "lag"), [(0, 0, 0), (1, 0, 1), (0, 2, 2), (1, 3, 3)])
def test_the_lag_that_is_allowed(ahead, max_lag, lag):
    assert allowed_lag(AsyncEngine(ahead=ahead), StalenessConfig(max_lag=max_lag)) == lag


def test_an_engine_that_does_not_sample_ahead_has_none():
    assert allowed_lag(NativeEngine(), StalenessConfig()) == 0
