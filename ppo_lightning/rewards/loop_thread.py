"""An event loop beside a program that has none, or has its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Set
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread. It does not survive a fork."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="reward-http", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine over there, and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C as well: nothing may go on behind the user's back
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, Any], *, spare: Set[asyncio.Future[None]]) -> None:
        """Cancel what still runs but some, run one last coroutine, and end."""
        try:
            self.run(self._ended(last, spare))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _ended(
        self, last: Coroutine[Any, Any, Any], spare: Set[asyncio.Future[None]]
    ) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()} - spare
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last
        for _ in range(3):  # sockets are closed by callbacks, in the rounds after
            await asyncio.sleep(0)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
