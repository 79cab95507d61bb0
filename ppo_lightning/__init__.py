"""PPO training of language models from human feedback, on PyTorch Lightning.

Importing the package loads nothing heavy: the public names below are looked up on first use,
so that ``ppo-lightning --version`` and the helper commands start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lightning.modules import PPOModule
    from ppo_lightning.rollout import RolloutDataModule

__version__ = "0.1.0"

__all__ = ["PPOModule", "RolloutDataModule", "__version__"]

_HOMES = {
    "PPOModule": "ppo_lightning.modules",
    "RolloutDataModule": "ppo_lightning.rollout",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """List the public names, also those not yet imported."""
    return sorted({*globals(), *__all__})
