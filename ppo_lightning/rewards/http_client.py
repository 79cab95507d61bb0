"""Requests to a reward server: a pool of connections, deadlines, and another try where it helps."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from ppo_lightning import __version__
from ppo_lightning.rewards.contract import (
    BadReply,
    NoNumber,
    decode_scores,
    is_loopback,
)
from ppo_lightning.rewards.extras import import_extra
from ppo_lightning.rewards.loop_thread import LoopThread

log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = list[float | NoNumber]

_PERMANENT = (401, 403, 404, 405)  # the next request would fare no better
_IDLE_SECONDS = 30.0  # a connection that is idle longer is not used again
_EXCERPT = 120
_LOOKED_AT = 10_000
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


class Trouble(Exception):
    """A request without a usable answer.

    Args:
        what: What happened instead, to follow the server's address.
        remedy: What to do about it.
        again: Whether another try may help.
        permanent: Whether every request would end like this one.
        wait: Seconds that the server asked to wait.
    """

    def __init__(
        self,
        what: str,
        remedy: str = "",
        *,
        again: bool = False,
        permanent: bool = False,
        wait: float | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.again = again
        self.permanent = permanent
        self.wait = wait


Outcome = Answer | Trouble


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How a server is asked; see ``HTTPReward``."""

    url: str
    timeout: float
    connect_timeout: float
    retries: int
    backoff: float
    max_backoff: float
    concurrency: int
    retry_on: Sequence[int]
    trust_env: bool
    max_reply_bytes: int
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Args:
        body: What is sent.
        count: Items in it.
        start: Number of its first item in the batch.
    """

    body: bytes
    count: int
    start: int


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
        self._httpx = import_extra("httpx", package="httpx", extra="http", needed_by="HTTPReward")
        self._clients: list[Any] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._thread = LoopThread()
        try:
            self._thread.run(self._open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._thread.stop(self._close(), spare=self._closing)

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

    async def _open(self) -> None:
        settings = self.settings
        local = is_loopback(urlsplit(settings.url).hostname or "")
        self._trust_env = settings.trust_env and not local
        self._tls = self._httpx.create_ssl_context(trust_env=self._trust_env)
        # The last one used comes first, so that connections are kept and no more than needed.
        self._free: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        for _ in range(settings.concurrency):
            self._free.put_nowait(None)

    async def _close(self) -> None:
        await asyncio.gather(*self._closing, return_exceptions=True)
        for client in self._clients:
            await client.aclose()

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[Any]:
        """Have one of the connections to oneself.

        Each is a client of its own: the time that httpx's pool takes to find a free one grows
        with the square of their number.
        """
        client = await self._free.get()
        try:
            client = client or self._new_client()
            yield client
        except BaseException:
            # Cut off in the middle, its pool may be in any state.
            if client is not None:
                self._discard(client)
            client = None
            raise
        finally:
            self._free.put_nowait(client)

    def _discard(self, client: Any) -> None:
        self._clients.remove(client)
        closing = asyncio.ensure_future(client.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _new_client(self) -> Any:
        settings, httpx = self.settings, self._httpx
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",  # a limit on bytes must be one on what they unfold to
            "User-Agent": f"ppo-lightning/{__version__}",
        }
        if settings.token is not None:
            headers["Authorization"] = f"Bearer {settings.token}"
        try:
            client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(settings.timeout, connect=settings.connect_timeout),
                limits=httpx.Limits(max_connections=1, keepalive_expiry=_IDLE_SECONDS),
                follow_redirects=False,
                trust_env=self._trust_env,
                verify=self._tls,
            )
        except (ImportError, ValueError) as error:
            raise Trouble(
                f"cannot be asked through the proxy that the environment names ({error})",
                "Mend `HTTP_PROXY` and the like, or set `trust_env: false`.",
                permanent=True,
            ) from error
        self._clients.append(client)
        return client

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
            status, headers, body = await self._exchange("POST", self.settings.url, request.body)
            if status != 200:
                raise self._refused(status, headers, body)
            try:
                return decode_scores(body, request.count)
            except BadReply as error:
                kind = str(headers.get("content-type", "no content type"))
                raise Trouble(
                    f"answered {self._excerpt(body)} ({kind[:60]}), {error}",
                    "Mend the server, or see whether `url` is the right page.",
                ) from error
        except Trouble as trouble:
            return trouble

    async def _exchange(self, method: str, url: str, body: bytes | None) -> tuple[int, Any, bytes]:
        """Send one request and read its answer, within the deadline for both together."""
        seconds = self.settings.timeout
        try:
            async with self._leased() as client:
                # A limit on each read alone would never end with a server that drips.
                return await asyncio.wait_for(self._send(client, method, url, body), seconds)
        except asyncio.TimeoutError as error:
            raise Trouble(
                f"gave no complete answer within {seconds:g} s",
                "Is the server overloaded? Raise `timeout`, or lower `batch_size` or "
                "`concurrency`.",
                again=True,
            ) from error
        except self._httpx.TransportError as error:
            said = self._redacted(str(error)).rstrip(".")
            raise Trouble(
                f"could not be asked: {type(error).__name__}{': ' if said else ''}{said}",
                "Is the server running there?",
                again=True,
            ) from error

    async def _send(
        self, client: Any, method: str, url: str, body: bytes | None
    ) -> tuple[int, Any, bytes]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        sending = client.stream(method, url, content=body, headers=headers)
        most, read = self.settings.max_reply_bytes, bytearray()
        async with sending as response:
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise Trouble("sent a compressed answer, which nobody asked for")
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) > most:
                    raise Trouble(
                        f"answered {response.status_code} with more than {most} bytes, "
                        f"beginning {self._excerpt(read)}",
                        "See whether `url` is the right page, or raise `max_reply_bytes`.",
                    )
            return response.status_code, response.headers, bytes(read)

    def _refused(self, status: int, headers: Any, body: bytes) -> Trouble:
        """Make of an answer that is not 200 what it means."""
        if 300 <= status < 400:
            place = without_secrets(str(headers.get("location", "")))
            return Trouble(
                f"answered {status} and points to {self._redacted(place)[:200]!r}",
                "Redirects are not followed, as the token would go along: set `url` to the right "
                "page.",
                permanent=True,
            )
        again = status in self.settings.retry_on
        return Trouble(
            f"answered {status}: {self._excerpt(body)}",
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
        status, headers, body = await self._exchange("GET", url, None)
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
            raise Trouble(f"is still {self._excerpt(str(said['status']).encode())}", again=True)
        return said

    def _excerpt(self, body: bytes | bytearray) -> str:
        # Redacted before it is cut, or the cut could leave half of a token.
        text = self._redacted(bytes(body[:_LOOKED_AT]).decode("utf-8", errors="replace"))
        if not text:
            return "nothing"
        return repr(text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…")

    def _redacted(self, text: str) -> str:
        """Take the token out of what a server sends back."""
        token = self.settings.token
        return text if token is None else text.replace(token, "***")


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(no URL)"
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + ("?…" if parts.query else "")


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
