"""DeepSpeed's ZeRO without DeepSpeed: what is said, and where numbers lie in its parts."""

import pytest

from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import zero_strategy
from ppo_lightning.modules.zero_strategy import ZeROStrategy


def test_a_missing_deepspeed_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(zero_strategy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*ppo-lightning\[deepspeed\].*`fsdp`"):
        ZeROStrategy()


@pytest.mark.parametrize("stage", [0, 4])
def test_the_stage_is_1_2_or_3(stage):
    with pytest.raises(ValueError, match=f"`stage` must be 1, 2 or 3, got {stage}"):
        ZeROStrategy(stage=stage)


@pytest.mark.parametrize("name", ["stage", "offload_optimizer"])
def test_settings_of_deepspeeds_own_that_would_change_the_step_are_refused(name):
    with pytest.raises(ConfigError, match=f"`zero.{name}` cannot be set"):
        ZeROStrategy(stage=2, zero={name: {}})
