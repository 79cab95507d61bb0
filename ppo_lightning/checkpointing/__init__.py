"""What checkpoints hold, how they are written, found again, and made into models."""

from ppo_lightning.checkpointing.export import (
    EMA_STATE,
    CheckpointModels,
    export_actor,
    export_critic,
    load_actor,
    load_critic,
    read_models,
)
from ppo_lightning.checkpointing.files import remove_leftovers, write_checkpoint
from ppo_lightning.checkpointing.find import Newest, newest_good, why_not
from ppo_lightning.checkpointing.reading import read_checkpoint, why_not_lightnings
from ppo_lightning.checkpointing.snapshots import Snapshot, SnapshotStore, Storage, copied

__all__ = [
    "EMA_STATE",
    "CheckpointModels",
    "Newest",
    "Snapshot",
    "SnapshotStore",
    "Storage",
    "copied",
    "export_actor",
    "export_critic",
    "load_actor",
    "load_critic",
    "newest_good",
    "read_checkpoint",
    "read_models",
    "remove_leftovers",
    "why_not",
    "why_not_lightnings",
    "write_checkpoint",
]
