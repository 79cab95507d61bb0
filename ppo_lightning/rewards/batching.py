"""Scores responses of many requests together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch

from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.errors import RewardError
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.contract import Item
from ppo_lightning.rewards.scores import scores_of
from ppo_lightning.types import Completions

log = logging.getLogger(__name__)


class Refused(RewardError):
    """The component says that it cannot score these items: a field is missing, for example."""


class QueueFull(RuntimeError):
    """More items wait than there is room for."""


class BatchScorer:
    """Puts items of several requests into batches, and scores one batch at a time in a thread.

    A request whose items cannot be scored fails alone: the others of its batch are scored again,
    each by itself.

    Args:
        component: Scores.
        name: How messages call it.
        max_batch: Most items in a batch.
        max_wait: Seconds that an item may wait for others to fill its batch.
        max_queue: Most items that may wait.
    """

    def __init__(
        self,
        component: Reward,
        *,
        name: str,
        max_batch: int = 32,
        max_wait: float = 0.002,
        max_queue: int = 10_000,
    ) -> None:
        require_at_least("max_batch", max_batch, 1)
        require_at_least("max_wait", max_wait, 0)
        require_at_least("max_queue", max_queue, 1)
        self.component = component
        self.name = name
        self.max_batch = max_batch
        self.max_wait = max_wait
        self.max_queue = max_queue
        self.ready = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()

    def load(self, device: torch.device) -> None:
        """Set the component up.

        Args:
            device: Where models are to live.
        """
        self.component.setup(device)
        self.ready = True

    def close(self) -> None:
        """Let go of the component; what is being scored is finished first."""
        self.ready = False
        self._thread.shutdown()
        self.component.close()

    @property
    def num_waiting(self) -> int:
        """Items in no batch yet."""
        return sum(job.num_waiting for job in self._jobs)

    async def score(self, items: Sequence[Item]) -> list[float]:
        """Score items, with those of others.

        Args:
            items: In any number.

        Returns:
            A number for each, NaN where the component gave none.

        Raises:
            QueueFull: Too many wait already.
            RewardError: The component failed; ``Refused`` where the items are at fault.
        """
        if not items:
            return []
        if self.num_waiting + len(items) > self.max_queue:
            raise QueueFull
        job = _Job(items)
        self._jobs.append(job)
        self._arrived.set()
        return await job.done

    async def run(self) -> None:
        """Score what arrives, until cancelled."""
        while True:
            await self._filled()
            batch = self._taken()
            if batch:
                await self._score_batch(batch)

    # ------------------------------------------------------------------ one batch

    async def _filled(self) -> None:
        """Wait until there is a whole batch, or something has waited long enough."""
        loop = asyncio.get_running_loop()
        while not self._jobs:
            self._arrived.clear()
            await self._arrived.wait()
        deadline = self._jobs[0].arrived + self.max_wait
        while self.num_waiting < self.max_batch and (left := deadline - loop.time()) > 0:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except asyncio.TimeoutError:
                return

    def _taken(self) -> list[tuple[_Job, range]]:
        """Take the items of the next batch: of each request a run of numbers."""
        batch: list[tuple[_Job, range]] = []
        room = self.max_batch
        while self._jobs and room:
            job = self._jobs[0]
            if not job.done.done():  # it is where the client has gone or another part failed
                part = job.take(room)
                batch.append((job, part))
                room -= len(part)
            if job.done.done() or not job.num_waiting:
                self._jobs.popleft()
        return batch

    async def _score_batch(self, batch: Sequence[tuple[_Job, range]]) -> None:
        items = [job.items[i] for job, part in batch for i in part]
        try:
            scores = await self._in_thread(items)
        except Exception as error:
            if len(batch) == 1:
                batch[0][0].fail(error)
                return
            for one in batch:
                await self._score_batch([one])
            return
        at = 0
        for job, part in batch:
            job.fill(part, scores[at : at + len(part)])
            at += len(part)

    async def _in_thread(self, items: Sequence[Item]) -> list[float]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._scores, items)

    def _scores(self, items: Sequence[Item]) -> list[float]:
        component = _Telling(self.component)
        found = scores_of(component, self.name, completions_of(items), on_nonfinite="drop")
        return found.tolist()


class _Job:
    """The items of one request."""

    def __init__(self, items: Sequence[Item]) -> None:
        loop = asyncio.get_running_loop()
        self.items = items
        self.arrived = loop.time()
        self.done: asyncio.Future[list[float]] = loop.create_future()
        self._scores: list[float] = [0.0] * len(items)
        self._taken = self._scored = 0

    @property
    def num_waiting(self) -> int:
        return 0 if self.done.done() else len(self.items) - self._taken

    def take(self, most: int) -> range:
        start = self._taken
        self._taken = min(len(self.items), start + most)
        return range(start, self._taken)

    def fill(self, part: range, scores: Sequence[float]) -> None:
        self._scores[part.start : part.stop] = scores
        self._scored += len(part)
        if self._scored == len(self.items) and not self.done.done():
            self.done.set_result(self._scores)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Telling(Reward):
    """Tells what a component says about its input from what the check of its answer says."""

    def __init__(self, component: Reward) -> None:
        self.component = component

    def __call__(self, completions: Completions) -> Any:
        try:
            return self.component(completions)
        except RewardError as error:
            raise Refused(str(error.args[0]), sample=error.sample) from error


def completions_of(items: Sequence[Item]) -> Completions:
    """Put items together as components read them.

    Ids that were not sent raise when they are read: a length of 0 would be scored like any other.
    """
    return Completions(
        prompts=[item.prompt for item in items],
        messages=[item.messages for item in items],
        responses=[item.response for item in items],
        prompt_ids=_ids("prompt_ids", [item.prompt_ids for item in items]),
        response_ids=_ids("response_ids", [item.response_ids for item in items]),
        truncated=[item.truncated for item in items],
        metadata=[item.metadata for item in items],
    )


def _ids(field: str, rows: Sequence[Sequence[int] | None]) -> list[Sequence[int]]:
    return [_NotSent(field) if row is None else row for row in rows]


class _NotSent(Sequence[int]):
    """Ids that a request lacks."""

    def __init__(self, field: str) -> None:
        self._field = field

    def _refuse(self) -> NoReturn:
        raise RewardError(
            f"the component reads `{self._field}`, which the request lacks: name it in `fields` of "
            "the HTTPReward that asks."
        )

    def __len__(self) -> int:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __iter__(self) -> Any:
        self._refuse()
