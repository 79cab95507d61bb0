"""Batches that depend on epoch and step alone: what a supervised run goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")


class StepLoader(Generic[Batch]):
    """Yield the batches of an epoch, from the step that the run has come to.

    ``__iter__`` is a generator function, because Lightning calls ``iter`` more often than it
    iterates: the place is asked for at the first ``next``. So a resumed run goes on in the middle
    of an epoch without any state of the loader's.

    Args:
        make: Makes this rank's batch of an epoch and a step in it.
        num_steps: Steps of an epoch.
        place: Tells the epoch, and the steps of it that are done.
    """

    def __init__(
        self,
        make: Callable[[int, int], Batch],
        *,
        num_steps: int,
        place: Callable[[], tuple[int, int]],
    ) -> None:
        self.make = make
        self.num_steps = num_steps
        self.place = place

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Batch]:
        epoch, done = self.place()
        for step in range(done, self.num_steps):
            yield self.make(epoch, step)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: that there is a state at all tells Lightning that this can be resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing; see ``state_dict``."""
