"""Connections to a reward server: a pool of them, one deadline for a whole exchange, no secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from ppo_lightning import __version__
from ppo_lightning.rewards.contract import is_loopback
from ppo_lightning.rewards.extras import import_extra
from ppo_lightning.rewards.http_settings import ClientSettings

_IDLE_SECONDS = 30.0  # a connection that is idle longer is not used again
_EXCERPT = 120
_LOOKED_AT = 10_000


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


class Connections:
    """As many connections as may be used at once. Lives in one event loop, begun by ``open``.

    Args:
        settings: How the server is asked.

    Raises:
        ConfigError: The package httpx is missing.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.closing: set[asyncio.Future[None]] = set()
        self._httpx = import_extra("httpx", package="httpx", extra="http", needed_by="HTTPReward")
        self._clients: list[Any] = []

    async def open(self) -> None:
        """Read the certificates, and make room for as many as may be used at once."""
        settings = self.settings
        local = is_loopback(urlsplit(settings.url).hostname or "")
        self._trust_env = settings.trust_env and not local
        self._tls = self._httpx.create_ssl_context(trust_env=self._trust_env)
        # The last one used comes first, so that connections are kept and no more than needed.
        self._free: asyncio.LifoQueue[Any] = asyncio.LifoQueue()
        for _ in range(settings.concurrency):
            self._free.put_nowait(None)

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*self.closing, return_exceptions=True)
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
        self.closing.add(closing)
        closing.add_done_callback(self.closing.discard)

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

    async def exchange(self, method: str, url: str, body: bytes | None) -> tuple[int, Any, bytes]:
        """Send one request and read its answer, within the deadline for both together.

        Returns:
            Status, headers, and body.

        Raises:
            Trouble: There is no answer, or none that may be read.
        """
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
            said = self.redacted(str(error)).rstrip(".")
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
                        f"beginning {self.excerpt(read)}",
                        "See whether `url` is the right page, or raise `max_reply_bytes`.",
                    )
            return response.status_code, response.headers, bytes(read)

    def excerpt(self, body: bytes | bytearray) -> str:
        """Quote the beginning of an answer."""
        # Redacted before it is cut, or the cut could leave half of a token.
        text = self.redacted(bytes(body[:_LOOKED_AT]).decode("utf-8", errors="replace"))
        if not text:
            return "nothing"
        return repr(text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…")

    def redacted(self, text: str) -> str:
        """Take the token out of what a server sends back."""
        token = self.settings.token
        return text if token is None else text.replace(token, "***")
