"""Weights in memory that two processes see: one writes, the other reads."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.distributed import whole
from ppo_lightning.errors import RolloutError

_ALIGNMENT = 64


@dataclass(frozen=True)
class _Place:
    """Where a weight lies, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class SharedWeights:
    """A piece of memory without a name, with a place for each weight.

    It does not lie in ``/dev/shm``, which containers often limit to 64 MB, and is gone with the
    last process that has it open, however that ends. It is handed to a process when that starts.

    Args:
        weights: Names, shapes and dtypes; values are not copied yet.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        places, end = {}, 0
        for name, weight in weights.items():
            size = weight.numel() * weight.element_size()
            places[name] = _Place(weight.dtype, tuple(weight.shape), end, size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._places, self.size = places, max(end, 1)
        self._file = _anonymous_file(self.size)
        self._views = self._mapped()

    def __getstate__(self) -> dict[str, Any]:
        return {"places": self._places, "size": self.size, "file": reduction.DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._places, self.size = state["places"], state["size"]
        self._file = state["file"].detach()
        self._views = self._mapped()

    def _mapped(self) -> dict[str, Tensor]:
        """Tensors over the memory, by name."""
        memory = torch.frombuffer(mmap.mmap(self._file, self.size), dtype=torch.uint8)
        return {
            name: memory[p.start : p.start + p.size].view(p.dtype).view(p.shape)
            for name, p in self._places.items()
        }

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> int:
        """Copy weights in; they may be on any device, and sharded: then all ranks do this together.

        Returns:
            Bytes that were copied.
        """
        for name, view in self._views.items():
            view.copy_(whole(weights[name].detach()))
        return sum(place.size for place in self._places.values())

    @torch.no_grad()
    def read_into(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights out, into a model of the same ones.

        Raises:
            RolloutError: The model has other weights.
        """
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes != {name: place.shape for name, place in self._places.items()}:
            names = sorted({*shapes} ^ {*self._places}) or sorted(shapes)
            raise RolloutError(
                f"the model that was loaded is not the trainer's: `{names[0]}` differs. Has the "
                "folder of `policy.path` changed since the run began?"
            )
        for name, view in self._views.items():
            weights[name].data.copy_(view)

    def close(self) -> None:
        """Let go of the memory."""
        if self._views:
            self._views = {}
            os.close(self._file)


def _anonymous_file(size: int) -> int:
    """Open a file without a name, in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("ppo-lightning-weights")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
