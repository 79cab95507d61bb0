"""What ``trainer.strategy`` may be called: words of this project, of Lightning, or a class."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from ppo_lightning.cli.classes import resolve
from ppo_lightning.errors import ConfigError, nearest
from ppo_lightning.modules import FSDP2Strategy, ZeROStrategy
from ppo_lightning.modules.zero_strategy import STAGES

WORDS = ("auto", "ddp", "fsdp", *STAGES)
"""Those that this project's modules can be trained with."""


def strategy_of(value: Any) -> Any:
    """Return what Lightning is to be given.

    Args:
        value: A word, the import path of a class that needs no arguments, or a strategy.

    Raises:
        ConfigError: There is no such word or class.
    """
    if not isinstance(value, str):
        return value
    word = value.lower()  # as Lightning reads it
    if word == "fsdp":  # to Lightning the first generation, which wraps
        return FSDP2Strategy()
    if word in STAGES:  # Lightning's own needs GPUs, and clips by one norm
        return ZeROStrategy(stage=STAGES[word])
    kind = resolve(value) if "." in value else None
    if isinstance(kind, type) and issubclass(kind, Strategy):
        return kind()
    if word == "auto" or word in StrategyRegistry.available_strategies():
        return value
    near = nearest(word, WORDS)
    hint = f"did you mean `{near}`? " if near else ""
    raise ConfigError(
        f"`trainer.strategy` cannot be `{value}`; {hint}There are {', '.join(WORDS)}, and classes "
        "such as `ppo_lightning.modules.FSDP2Strategy`."
    )
