"""Requests to a reward server: some at a time, and another try where it helps."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ppo_lightning.distributed import pulse
from ppo_lightning.rewards.contract import BadReply, NoNumber, decode_scores
from ppo_lightning.rewards.http_connections import Connections, Trouble
from ppo_lightning.rewards.http_requests import Request
from ppo_lightning.rewards.http_settings import ClientSettings, without_secrets
from ppo_lightning.rewards.loop_thread import LoopThread

log = logging.getLogger(__name__)

Answer = list[float | NoNumber]

_PERMANENT = (401, 403, 404, 405)  # the next request would fare no better
_WAITING = "Waiting %g s at most for the reward server `%s`, which %s."
_OWN_RANDOM = random.SystemRandom()  # the run's random numbers must not depend on a server's moods

_REMEDIES = {
    400: "Does the server speak version 1 of the contract?",
    401: "It wants another token: set `token_env` to the variable that holds it.",
    403: "It does not allow this: see `token_env`.",
    404: "There is no such page: see the path in `url`.",
    405: "That page takes no POST: see the path in `url`.",
    413: "Lower `batch_size`, or raise the server's limits.",
    422: "Does the server speak version 1 of the contract, and get the `fields` that it needs?",
    429: "It is overloaded: lower `concurrency`, or raise `retries`.",
    503: "It is overloaded or not ready: lower `concurrency`, or raise `retries`.",
}

Outcome = Answer | Trouble


class ScoreClient:
    """Asks a server from a thread of its own, so that every deadline holds whatever it does.

    Args:
        settings: How.
        sleep: Waits for some seconds, between tries.
        clock: Seconds, from any start.
        jitter: Draws from [0, 1): the share of half a delay that is waited on top of the other.

    Raises:
        ConfigError: The package httpx is missing.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = _OWN_RANDOM.random,
    ) -> None:
        self.settings = settings
        self.shown_url = without_secrets(settings.url)
        self._sleep, self._clock, self._jitter = sleep, clock, jitter
        self._connections = Connections(settings)
        self._thread = LoopThread()
        try:
            self._thread.run(self._connections.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._thread.stop(self._connections.close(), spare=self._connections.closing)

    def ask(self, requests: Sequence[Request], *, stop_at_trouble: bool) -> list[Outcome | None]:
        """Send requests, some at a time.

        A signal's handler is called while this waits, and Ctrl-C ends it.

        Args:
            requests: In any number.
            stop_at_trouble: Give up what is still on its way once one request has failed for good.

        Returns:
            What came of each, in their order; None where it was given up.
        """
        return self._thread.run(self._ask_all(requests, stop_at_trouble))

    def health(self, path: str, *, within: float) -> Any:
        """Wait until the server says that it is ready.

        Args:
            path: To ask, on the server of ``url``.
            within: Seconds that it may take.

        Returns:
            The JSON object that it says; an empty one where it is none.

        Raises:
            Trouble: It is not ready in time, or refuses.
        """
        return self._thread.run(self._health(path, within))

    # ------------------------------------------------------------------ in the thread

    async def _ask_all(
        self, requests: Sequence[Request], stop_at_trouble: bool
    ) -> list[Outcome | None]:
        results: list[Outcome | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))
        failed: list[Trouble] = []

        async def work() -> None:
            for i, request in waiting:
                # Where one request has had all its tries in vain, the next get one each.
                down = any(trouble.again for trouble in failed)
                retries = 0 if down else self.settings.retries
                outcome = results[i] = await self._ask(request, retries)
                pulse.beat()
                if isinstance(outcome, Trouble):
                    failed.append(outcome)
                    if stop_at_trouble or outcome.permanent:
                        stop.set()

        stop = asyncio.Event()
        workers = [asyncio.ensure_future(work()) for _ in range(self.settings.concurrency)]
        stopping = asyncio.ensure_future(stop.wait())
        everyone = asyncio.gather(*workers)
        try:
            ends: list[asyncio.Future[Any]] = [everyone, stopping]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                everyone.result()  # raises what a worker raised
        finally:
            for task in (*workers, stopping):
                task.cancel()
            await asyncio.gather(everyone, *workers, stopping, return_exceptions=True)
        return results

    async def _ask(self, request: Request, retries: int) -> Outcome:
        attempt = 0
        while True:
            outcome = await self._attempt(request)
            if not isinstance(outcome, Trouble):
                return outcome
            if not outcome.again or attempt == retries:
                break
            await self._sleep(self.delay(attempt, outcome.wait))
            attempt += 1
        if attempt:
            outcome.what += f" (the last of {attempt + 1} tries)"
        return outcome

    def delay(self, attempt: int, asked: float | None = None) -> float:
        """Seconds to wait after a try.

        Args:
            attempt: Its number, from 0.
            asked: Seconds that the server asked for.
        """
        settings = self.settings
        if asked is not None:
            return min(max(asked, 0.0), settings.max_backoff)
        longest = min(settings.backoff * 2.0**attempt, settings.max_backoff)
        return longest * (1 + self._jitter()) / 2

    async def _attempt(self, request: Request) -> Outcome:
        try:
            status, headers, body = await self._connections.exchange(
                "POST", self.settings.url, request.body
            )
            if status != 200:
                raise self._refused(status, headers, body)
            try:
                return decode_scores(body, request.count)
            except BadReply as error:
                kind = str(headers.get("content-type", "no content type"))
                raise Trouble(
                    f"answered {self._connections.excerpt(body)} ({kind[:60]}), {error}",
                    "Mend the server, or see whether `url` is the right page.",
                ) from error
        except Trouble as trouble:
            return trouble

    def _refused(self, status: int, headers: Any, body: bytes) -> Trouble:
        """Make of an answer that is not 200 what it means."""
        if 300 <= status < 400:
            place = without_secrets(str(headers.get("location", "")))
            return Trouble(
                f"answered {status} and points to {self._connections.redacted(place)[:200]!r}",
                "Redirects are not followed, as the token would go along: set `url` to the right "
                "page.",
                permanent=True,
            )
        again = status in self.settings.retry_on
        return Trouble(
            f"answered {status}: {self._connections.excerpt(body)}",
            _REMEDIES.get(status, "See the server's log."),
            again=again,
            permanent=status in _PERMANENT,
            wait=_seconds(headers.get("retry-after")) if again else None,
        )

    async def _health(self, path: str, within: float) -> Any:
        parts = urlsplit(self.settings.url)
        url, start = urlunsplit((parts.scheme, parts.netloc, path, "", "")), self._clock()
        attempt = 0
        while True:
            try:
                return await self._is_ready(url, path)
            except Trouble as trouble:
                if not trouble.again or self._clock() - start >= within:
                    raise
                if attempt == 0:
                    log.warning(_WAITING, within, self.shown_url, trouble.what)
            await self._sleep(min(self.delay(attempt), 2.0))
            attempt += 1

    async def _is_ready(self, url: str, path: str) -> Any:
        status, headers, body = await self._connections.exchange("GET", url, None)
        if status in (404, 405):
            raise Trouble(
                f"has no page {path} (it answered {status})",
                "Set `health` to the page that says whether it is ready, or to null for none.",
            )
        if status != 200:
            trouble = self._refused(status, headers, body)
            trouble.what = f"{trouble.what}, asked for {path}"
            trouble.again = trouble.again or status == 503
            raise trouble
        said = _json_object(body)
        if said.get("status", "ready") != "ready":
            raise Trouble(
                f"is still {self._connections.excerpt(str(said['status']).encode())}", again=True
            )
        return said


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _seconds(retry_after: str | None) -> float | None:
    """Read a ``Retry-After``: seconds, or a date; None where it is neither."""
    if retry_after is None:
        return None
    if retry_after.strip().isdigit():
        return float(retry_after.strip()[:9])
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
