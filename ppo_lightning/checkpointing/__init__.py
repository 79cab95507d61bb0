"""What checkpoints hold, how they are written, found again, and made into models."""

from ppo_lightning.checkpointing.contents import (
    EMA_STATE,
    CheckpointModels,
    checkpoint_kind,
    read_models,
)
from ppo_lightning.checkpointing.export import export_actor, export_critic, export_supervised
from ppo_lightning.checkpointing.files import put_back, remove_leftovers, write_checkpoint
from ppo_lightning.checkpointing.find import Newest, newest_good, why_not
from ppo_lightning.checkpointing.parts import (
    Stored,
    is_in_parts,
    made_whole,
    read_parts,
    write_parts,
)
from ppo_lightning.checkpointing.reading import read_checkpoint, why_not_lightnings
from ppo_lightning.checkpointing.rebuild import load_actor, load_critic
from ppo_lightning.checkpointing.snapshots import Snapshot, SnapshotStore, Storage, copied
from ppo_lightning.checkpointing.supervised import (
    SupervisedModels,
    load_supervised,
    read_supervised,
)

__all__ = [
    "EMA_STATE",
    "CheckpointModels",
    "Newest",
    "Snapshot",
    "SnapshotStore",
    "Storage",
    "Stored",
    "SupervisedModels",
    "checkpoint_kind",
    "copied",
    "export_actor",
    "export_critic",
    "export_supervised",
    "is_in_parts",
    "load_actor",
    "load_critic",
    "load_supervised",
    "made_whole",
    "newest_good",
    "put_back",
    "read_checkpoint",
    "read_models",
    "read_parts",
    "read_supervised",
    "remove_leftovers",
    "why_not",
    "why_not_lightnings",
    "write_checkpoint",
    "write_parts",
]
