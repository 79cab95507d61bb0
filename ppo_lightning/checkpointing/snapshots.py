"""States of a run to go back to, in memory or on disk."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ppo_lightning.checkpointing.files import lock
from ppo_lightning.configs.checks import require
from ppo_lightning.distributed import any_rank, gather_from_ranks, rank
from ppo_lightning.errors import CheckpointError, first_line
from ppo_lightning.io import open_atomic

Storage = Literal["memory", "disk"]

_FORMAT = 1
_NAME = "after_{completed:06d}_iterations.rank_{rank}{of}.pt"
_PATTERN = re.compile(r"after_(\d+)_iterations\.rank_(\d+)(?:_of_(\d+))?\.pt")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A state that was found.

    Args:
        iteration: After which it was taken; −1 is before the first.
        state: Plain containers and tensors. Not to be changed.
        passed_over: A line on each newer snapshot that could not be read.
    """

    iteration: int
    state: Mapping[str, Any]
    passed_over: tuple[str, ...] = ()


class SnapshotStore:
    """Keeps the newest states of a run, and one that is pinned; every rank keeps its own.

    A snapshot counts only if all ranks have it: what one of them could not write is dropped by all,
    and what one of them cannot read is passed over by all.

    Args:
        storage: ``memory`` keeps copies on the CPU; ``disk`` writes files, which a resumed run
            finds again.
        keep: States to keep; the oldest goes first.
        device: Of this rank, for agreeing with the others.
        folder: Of the files; needed for ``disk``.
        parts: Ranks whose parts make a whole state; 1 where each has all of it. Files of another
            number are none of this store's.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        keep: int,
        device: torch.device,
        folder: Path | None = None,
        parts: int = 1,
    ) -> None:
        require(keep >= 1, f"`keep` must be at least 1, got {keep}.")
        require(storage == "memory" or folder is not None, "`folder` is needed on disk.")
        self.storage, self.keep, self.device = storage, keep, device
        self.folder = folder or Path()
        self.parts = parts
        self._states: dict[int, Mapping[str, Any]] = {}
        self._warned = False

    @property
    def iterations(self) -> list[int]:
        """Iterations after which this rank has a state, oldest first."""
        if self.storage == "memory":
            return sorted(self._states)
        names = [_PATTERN.fullmatch(path.name) for path in self.folder.glob("*.pt")]
        own = (rank(), self.parts)
        return sorted(int(n[1]) - 1 for n in names if n and (int(n[2]), int(n[3] or 1)) == own)

    def put(self, iteration: int, state: Mapping[str, Any], *, pinned: int | None = None) -> bool:
        """Keep a state. To be called on all ranks.

        If it cannot be written the older ones stay, a warning says so once, and the run goes on.

        Args:
            iteration: After which it was taken.
            state: Plain containers and tensors; copied, so that the run may change them.
            pinned: Iteration of a state that stays however old it is; one of the ``keep``.

        Returns:
            Whether it is kept.
        """
        if self.storage == "memory":
            self._make_room(iteration, pinned)  # first: one state may be most of the memory
            self._states[iteration] = copied(state)
        else:
            problem = self._write(iteration, state)
            if any_rank(problem is not None, self.device):
                self._say_not_written(iteration, problem)
                self._path(iteration).unlink(missing_ok=True)
                return False
            self._make_room(iteration, pinned)  # last: a write that fails costs no older state
        return True

    def _make_room(self, iteration: int, pinned: int | None) -> None:
        """Remove the oldest states, so that with this one there are ``keep``."""
        others = [i for i in self.iterations if i not in (iteration, pinned)]
        stays = pinned != iteration and pinned in self.iterations
        self._remove(others[: max(len(others) + stays + 1 - self.keep, 0)])

    def latest(self) -> Snapshot:
        """Return the newest state that every rank can read. To be called on all ranks.

        Raises:
            CheckpointError: There is none.
        """
        lines: list[str] = []
        # Ranks may have lost different files, and must try the same ones in the same order.
        candidates = self.iterations
        if self.storage == "disk":
            candidates = sorted(set(gather_from_ranks(candidates)))
        for iteration in reversed(candidates):
            state, problem = self._read(iteration)
            if not any_rank(state is None, self.device):
                assert state is not None
                return Snapshot(iteration=iteration, state=state, passed_over=tuple(lines))
            problem = problem or "another rank cannot read its part"
            lines.append(f"snapshot {self._named(iteration)} is passed over: {problem}")
        found = "; ".join(lines) or "there is none"
        raise CheckpointError(f"No snapshot to go back to: {found}. Resume from a checkpoint.")

    def drop_after(self, iteration: int) -> None:
        """Forget the states taken after a later iteration than this one."""
        self._remove([i for i in self.iterations if i > iteration])

    def clear(self) -> None:
        """Forget all states."""
        self._remove(self.iterations)

    def _remove(self, iterations: Iterable[int]) -> None:
        for iteration in iterations:
            if self.storage == "memory":
                del self._states[iteration]
            else:
                self._path(iteration).unlink(missing_ok=True)

    def _path(self, iteration: int) -> Path:
        of = "" if self.parts == 1 else f"_of_{self.parts}"
        return self.folder / _NAME.format(completed=iteration + 1, rank=rank(), of=of)

    def _named(self, iteration: int) -> str:
        return f"`{self._path(iteration)}`" if self.storage == "disk" else f"{iteration}"

    def _write(self, iteration: int, state: Mapping[str, Any]) -> str | None:
        """Write a file; returns what went wrong."""
        content = {"format_version": _FORMAT, "iteration": iteration, "state": state}
        try:
            with open_atomic(self._path(iteration)) as file:
                lock(file)
                torch.save(content, file)
        except (OSError, RuntimeError) as error:  # torch's zip writer turns some into the latter
            return first_line(error)
        return None

    def _say_not_written(self, iteration: int, problem: str | None) -> None:
        if self._warned:
            return
        self._warned = True
        kept = ", ".join(str(i) for i in self.iterations if i != iteration) or "none"
        warnings.warn(
            f"The snapshot after iteration {iteration} could not be written to `{self.folder}`: "
            f"{problem or 'another rank failed'}. Those of iterations {kept} stay, and the run "
            "goes on; make room on the disk, or keep snapshots in memory (`storage: memory`).",
            stacklevel=3,
        )

    def _read(self, iteration: int) -> tuple[Mapping[str, Any] | None, str | None]:
        """Return a state, or what is wrong with it."""
        if self.storage == "memory":
            return self._states[iteration], None
        try:
            # Mapped: a state may be as large as the model and its moments, and is copied from.
            content = torch.load(
                self._path(iteration), map_location="cpu", weights_only=True, mmap=True
            )
            if content["format_version"] != _FORMAT or content["iteration"] != iteration:
                return None, "it is of another version or iteration"
            return content["state"], None
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            return None, first_line(error)
        except (KeyError, TypeError, ValueError) as error:
            return None, f"it is no snapshot ({first_line(error)})"


def copied(value: Any) -> Any:
    """Return plain containers with every tensor cloned on the CPU; tied tensors stay tied."""
    return _copied(value, {})


def _copied(value: Any, clones: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() == 0 or key not in clones:
            clones[key] = value.detach().to("cpu", copy=True)
        return clones[key]
    if isinstance(value, Mapping):
        return {key: _copied(item, clones) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, clones) for item in value)
    return value
