"""The console script ``ppo-lightning`` and its commands; see ``cli.main``.

Importing this room loads nothing heavy.
"""

from typing import Any

__all__ = ["PPOLightningCLI"]


def __getattr__(name: str) -> Any:
    """Import the class on first use (PEP 562): it brings Lightning along."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ppo_lightning.cli.lightning import PPOLightningCLI

    return PPOLightningCLI
