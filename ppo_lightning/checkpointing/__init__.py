"""What is made of checkpoints after a run."""

from ppo_lightning.checkpointing.export import (
    CheckpointModels,
    export_actor,
    export_critic,
    load_actor,
    load_critic,
    read_models,
)

__all__ = [
    "CheckpointModels",
    "export_actor",
    "export_critic",
    "load_actor",
    "load_critic",
    "read_models",
]
