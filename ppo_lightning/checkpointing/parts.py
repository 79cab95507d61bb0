"""Checkpoints in parts: a folder to which every rank writes what it has.

``checkpoint.pt`` is the checkpoint as other strategies write it, but for tensors in shards: in
their place stand shape and dtype, and their values lie in ``part_<rank>.pt``, a block from each
rank. Only tensors and plain containers, as everywhere. Any number of ranks may read them again:
each takes the values that it needs from whichever files have them.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ppo_lightning.checkpointing.files import Watched, lock, remove, system_error
from ppo_lightning.distributed import (
    fault_point,
    first_of_tied,
    gather_from_ranks,
    in_shards,
    is_shard,
    local,
    local_block,
    mapped,
    peer,
    rank,
    spans_peers,
    world_size,
)
from ppo_lightning.errors import CheckpointError, first_line
from ppo_lightning.io import open_atomic, sync_folder

_WHOLE = "checkpoint.pt"
_PART = "part_{rank:05d}.pt"
_MARK = "tensor in parts"
_COUNT = "number of parts"


class Stored:
    """A tensor that lies in parts on the disk, and is read where it is needed.

    Args:
        key: Of the tensor in the files.
        shape: Of the whole.
        dtype: Of its values.
        files: By rank, what each part holds; mapped rather than read.
    """

    def __init__(
        self, key: str, shape: torch.Size, dtype: torch.dtype, files: Sequence[Mapping[str, Any]]
    ) -> None:
        self.key, self.shape, self.dtype = key, shape, dtype
        self._files = files

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read a block.

        Args:
            offset: Where it begins in each dimension.
            size: How long it is in each.

        Raises:
            CheckpointError: Some of it lies in no part.
        """
        found = torch.empty(tuple(size), dtype=self.dtype)
        missing, seen = found.numel(), set()
        for block in (file[self.key] for file in self._files if self.key in file):
            place = tuple(block["offset"])
            if place not in seen:  # twice where one file was put in the place of another
                missing -= _copy_common(block, found, offset)
            seen.add(place)
        if missing > 0:
            raise CheckpointError(f"The checkpoint lacks {missing} values of `{self.key}`.")
        return found

    def whole(self) -> Tensor:
        """Read all of it."""
        return self.read([0] * len(self.shape), self.shape)


def _copy_common(block: Mapping[str, Any], into: Tensor, offset: Sequence[int]) -> int:
    """Copy what a block of the file has of a wanted one; returns how many values."""
    values: Tensor = block["values"]
    theirs, ours = [], []
    for start, length, begin, count in zip(
        block["offset"], values.shape, offset, into.shape, strict=True
    ):
        first, last = max(start, begin), min(start + length, begin + count)
        if first >= last:
            return 0
        theirs.append(slice(first - start, last - start))
        ours.append(slice(first - begin, last - begin))
    part = values[tuple(theirs)]
    into[tuple(ours)] = part
    return part.numel()


# ------------------------------------------------------------------ writing


def write_parts(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint as a folder; to be called on all ranks.

    It appears under its name when all ranks have written their parts.

    Args:
        checkpoint: The same containers on all ranks.
        path: Of the folder; what stands there is replaced.

    Raises:
        CheckpointError: On all ranks, if one could not write its part.
    """
    target = Path(path)
    (token, *_) = gather_from_ranks([uuid4().hex])
    work = target.with_name(f".{target.name}.{token}.tmp")
    firsts = first_of_tied(in_shards(checkpoint))
    problem = _written(checkpoint, firsts, work)
    problems = [f"rank {n}: {text}" for n, text in enumerate(gather_from_ranks([problem])) if text]
    if not problems:
        problem = _named(work, target, token) if rank() == 0 else None
        problems = [text for text in gather_from_ranks([problem]) if text]
    if problems and rank() == 0:
        shutil.rmtree(work, ignore_errors=True)
    if problems:
        raise CheckpointError(
            f"the checkpoint `{target}` could not be written: {problems[0]}. Earlier checkpoints "
            f"are whole. See that `{target.parent}` can be written to and has room, and go on with "
            "`--ckpt_path last`."
        )


def _written(checkpoint: Mapping[str, Any], firsts: Sequence[int], work: Path) -> str | None:
    """Write this rank's files, tied tensors once; returns what went wrong."""
    own: dict[str, Any] = {}
    numbers = iter(firsts)

    def described(tensor: Tensor) -> Any:
        if not is_shard(tensor):
            return tensor
        key, part = str(next(numbers)), local(tensor.detach())
        if key not in own and (peer() == 0 or spans_peers(tensor)):
            own[key] = {"offset": list(local_block(tensor)[0]), "values": part.cpu()}
        return {_MARK: key, "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:]}

    try:
        work.mkdir(parents=True, exist_ok=True)
        # Opened first: without a locked file in it, another run's start takes the folder for a
        # leftover, and copies from a GPU take a while.
        with _opened(work / _PART.format(rank=rank())) as into:
            plain = mapped(checkpoint, described)
            torch.save(own, into)
        if rank() == 0:
            _save({**plain, _COUNT: world_size()}, work / _WHOLE)
    except Exception as error:  # whatever it is: the others wait to hear of it
        cause = system_error(error) or error
        return f"{type(cause).__name__}: {first_line(cause)}"
    return None


def _save(content: Any, path: Path) -> None:
    with _opened(path) as into:
        torch.save(content, into)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with open_atomic(path) as file:
        lock(file)
        yield Watched(file)


def _named(work: Path, target: Path, token: str) -> str | None:
    """Let a complete folder take the name, and what stood there go; returns what went wrong."""
    missing = [n for n in range(world_size()) if not (work / _PART.format(rank=n)).is_file()]
    if missing:
        return f"rank {missing[0]} wrote to another disk: checkpoints need a folder that all share"
    former = target.with_name(f".{target.name}.{token}.old")
    try:
        if target.exists() or target.is_symlink():
            target.rename(former)
        fault_point("parts_between_names")
        work.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        return first_line(error)
    remove(former)
    return None


# ------------------------------------------------------------------ reading


def is_in_parts(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint in parts."""
    return (Path(path) / _WHOLE).is_file()


def read_parts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint in parts, with ``Stored`` in the place of tensors that lie in them.

    Files are mapped, so this takes no time or memory.

    Raises:
        CheckpointError: A file is missing or cannot be read; in words that follow the path.
    """
    folder = Path(path)
    content = _load(folder / _WHOLE)
    files = [_load(folder / _PART.format(rank=n)) for n in range(int(content.pop(_COUNT)))]

    def found(value: Any) -> Any:
        if isinstance(value, Mapping):
            if _MARK in value:
                dtype = getattr(torch, value["dtype"])
                return Stored(value[_MARK], torch.Size(value["shape"]), dtype, files)
            return {key: found(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(found(item) for item in value)
        return value

    result: dict[str, Any] = found(content)
    return result


def _load(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        problem = "cannot be read" if path.is_file() else "is missing"
        raise CheckpointError(f"is incomplete (`{path.name}` {problem})")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch has no one error for what it cannot read
        raise CheckpointError(f"cannot be read (`{path.name}`: {first_line(error)})") from error
    return content


def made_whole(value: Any) -> Any:
    """Read every tensor that lies in parts, in plain containers, which are copied."""
    if isinstance(value, Stored):
        return value.whole()
    if isinstance(value, Mapping):
        return {key: made_whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(made_whole(item) for item in value)
    return value
