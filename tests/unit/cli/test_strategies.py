"""Words and classes for `trainer.strategy`."""

import pytest
from lightning.pytorch.strategies import DDPStrategy

from ppo_lightning.cli.strategies import strategy_of
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import FSDP2Strategy


@pytest.mark.parametrize("word", ["auto", "ddp", "DDP", "ddp_spawn"])
def test_lightnings_words_stay(word):
    assert strategy_of(word) == word


@pytest.mark.parametrize("word", ["fsdp", "FSDP", "ppo_lightning.modules.FSDP2Strategy"])
def test_t47_fsdp_is_the_second_generation(word):
    assert type(strategy_of(word)) is FSDP2Strategy


def test_what_was_built_stays():
    built = DDPStrategy()
    assert strategy_of(built) is built


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fdsp", r"cannot be `fdsp`; did you mean `fsdp`\? There are auto, ddp, fsdp,"),
        ("deepspeed_stage_4", r"did you mean `deepspeed_stage_\d`\?"),
        ("horovod", r"cannot be `horovod`; There are auto, ddp"),
        ("ppo_lightning.modules.FSDP3Strategy", r"cannot be `ppo_lightning.modules.FSDP3Strategy`"),
        ("ppo_lightning.modules.PPOModule", r"cannot be `ppo_lightning.modules.PPOModule`"),
    ],
)
def test_others_are_refused_with_what_there_is(word, said):
    with pytest.raises(ConfigError, match=said):
        strategy_of(word)
