"""The one way in which checkpoint files are read, and what is said of those that are none."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ppo_lightning.checkpointing.parts import is_in_parts, read_parts
from ppo_lightning.errors import CheckpointError, first_line

_NO_ARCHIVE = "it is no file that `torch.save` has written, or is cut short"
_SHARDS = ".metadata"  # what a folder of torch's distributed checkpoints holds


def read_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return what a checkpoint file holds; tensors are mapped, so this takes no time or memory.

    Only tensors and plain containers are taken from it; of a checkpoint in parts, ``Stored`` stands
    for tensors that lie in them.

    Raises:
        CheckpointError: No such file, or not one that can be read; in words that follow its name.
    """
    path = Path(path)
    if is_in_parts(path):
        return read_parts(path)
    if not path.is_file():
        raise CheckpointError("is a folder, not a file" if path.is_dir() else "does not exist")
    if not zipfile.is_zipfile(path):  # torch would talk of formats and flags
        raise CheckpointError(f"cannot be read ({_NO_ARCHIVE})")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch has no one error for what it cannot read
        problem = f"cannot be read ({first_line(error).split('. ')[0]})"
        raise CheckpointError(problem) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"is not a checkpoint: it holds a {type(content).__name__}")
    return content


def why_not_lightnings(path: str | os.PathLike[str]) -> str | None:
    """Say why Lightning cannot load a checkpoint, in words that follow its name; None if it may.

    It may be of any module: what is more than tensors and plain values is left to Lightning.
    """
    if (Path(path) / _SHARDS).is_file():  # another module's
        return None
    try:
        content = read_checkpoint(path)
    except CheckpointError as error:
        return None if zipfile.is_zipfile(path) and error.__cause__ is not None else str(error)
    if not {"state_dict", "pytorch-lightning_version"} <= content.keys():
        return "is not a checkpoint of Lightning: it holds no `state_dict` with its version"
    return None
