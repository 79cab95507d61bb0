"""The other end of ``HTTPReward``: a component behind HTTP. Importing it needs extra ``server``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ppo_lightning import __version__
from ppo_lightning.configs.checks import require, require_within
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards.batching import BatchScorer, QueueFull, Refused
from ppo_lightning.rewards.contract import (
    VERSION,
    BadRequest,
    Item,
    decode_request,
    encode_scores,
    is_loopback,
)

log = logging.getLogger(__name__)

_IDLE_SECONDS = 75  # a connection that asks nothing for so long is closed
_GRACE_SECONDS = 60  # for what is on its way when the server is told to stop
_DRAINED_BYTES, _DRAIN_SECONDS = 256_000_000, 10.0  # of a body that is refused


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes.

    Args:
        max_body_bytes: Longest body of a request.
        max_items: Most items in a request.
        body_seconds: Time for a body to arrive.
    """

    max_body_bytes: int = 16_000_000
    max_items: int = 1024
    body_seconds: float = 60.0


def score_app(
    scorer: BatchScorer,
    *,
    token: str | None = None,
    limits: Limits = Limits(),
) -> Starlette:
    """Make the application: ``GET /health`` and ``POST /score``.

    Args:
        scorer: Scores; may be loaded while the application runs already.
        token: What a request must bear; None asks for none.
        limits: What it takes.

    Raises:
        ConfigError: A request may be longer than what may wait: it could never be served.
    """
    require(
        limits.max_items <= scorer.max_queue,
        f"`--max-items` must be at most `--max-queue`, which is {scorer.max_queue}, got "
        f"{limits.max_items}: a request longer than the queue could never be served.",
    )
    pages = _Pages(scorer, token, limits)
    return Starlette(
        routes=[
            Route("/health", pages.health, methods=["GET"]),
            Route("/score", pages.score, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _any_error},
        lifespan=pages.lifespan,
    )


class _Pages:
    def __init__(self, scorer: BatchScorer, token: str | None, limits: Limits) -> None:
        self.scorer = scorer
        self.limits = limits
        self._expected = None if token is None else token.encode()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        batches = asyncio.ensure_future(self.scorer.run())
        try:
            yield
        finally:
            batches.cancel()

    async def health(self, request: Request) -> Response:
        ready = self.scorer.ready
        said: dict[str, Any] = {
            "status": "ready" if ready else "loading",
            "model": self.scorer.name,
            "version": VERSION,
            "server": f"ppo-lightning {__version__}",
        }
        if ready:
            said["fingerprint"] = self.scorer.component.fingerprint()
        return JSONResponse(said, status_code=200 if ready else 503)

    async def score(self, request: Request) -> Response:
        try:
            self._check_token(request)
            if not self.scorer.ready:
                return _problem(503, "the model is still loading.", retry_after=1, unread=True)
            body = await self._body(request)
            items = decode_request(body, max_items=self.limits.max_items)
            return await self._scored(request, items)
        except BadRequest as error:
            return _problem(error.status, str(error), unread=isinstance(error, _Unread))
        except Refused as error:
            return _problem(422, str(error))
        except QueueFull:
            return _problem(503, "too many responses wait to be scored.", retry_after=1)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            # Its text may tell of files and settings of this machine.
            log.error("Scoring failed", exc_info=error)
            return _problem(500, "the reward failed on this request; the server's log says how.")

    def _check_token(self, request: Request) -> None:
        if self._expected is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compared in constant time, also where the scheme is wrong.
        same = secrets.compare_digest(given.strip().encode("utf-8"), self._expected)
        if not (same and scheme.lower() == "bearer"):
            raise _Unread(401, "a valid bearer token is needed: `Authorization: Bearer TOKEN`.")

    async def _body(self, request: Request) -> bytes:
        most = self.limits.max_body_bytes
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced[:18]) > most:
            raise _Unread(413, f"the body has {announced[:18]} bytes, {most} is the most.")
        try:
            return await asyncio.wait_for(_read(request, most), self.limits.body_seconds)
        except asyncio.TimeoutError as error:
            raise BadRequest(408, "the body did not arrive in time.") from error

    async def _scored(self, request: Request, items: list[Item]) -> Response:
        """Score, unless the client goes away: then its items take up no place in a batch."""
        scoring = asyncio.ensure_future(self.scorer.score(items))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({scoring, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise ClientDisconnect
            body = encode_scores(scoring.result())
            return Response(body, media_type="application/json")
        finally:
            scoring.cancel()
            leaving.cancel()


async def _read(request: Request, most: int) -> bytes:
    """Read a body, which need not say how long it is."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise _Unread(413, f"the body has more than {most} bytes.")
    return bytes(body)


async def _left(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Unread(BadRequest):
    """A request that is refused before all of its body was read."""


class _Refusal(JSONResponse):
    """An answer to a request that is still being sent.

    A connection that is closed on a client in the middle of a request is reset, and the answer is
    lost on the way: what it sends is taken, and thrown away, until it has read the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drain(receive), _DRAIN_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive) -> None:
    left = _DRAINED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _problem(
    status: int, message: str, *, retry_after: int | None = None, unread: bool = False
) -> Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (401, 408, 413, 503):
        headers["Connection"] = "close"  # the body may not have been read
    kind = _Refusal if unread else JSONResponse
    return kind({"error": message}, status_code=status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "There are `GET /health` and `POST /score`."
    response = _problem(error.status_code, f"{error.detail}. {known}")
    response.headers.update(error.headers or {})
    return response


async def _any_error(request: Request, error: Exception) -> Response:
    return _problem(500, "the server failed; its log says how.")


class RewardServer:
    """A server in a thread, so that the main one can load the model and take signals.

    Args:
        app: What it serves.
        host: Name or address to listen on.
        port: 0 takes a free one.

    Raises:
        ConfigError: The address cannot be used.
    """

    def __init__(self, app: Starlette, *, host: str, port: int) -> None:
        self._socket = _listening(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="reward-server", daemon=True)

    @property
    def url(self) -> str:
        """Address of the page that scores."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/score"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        """Take no more connections, and end once all is answered; ``now`` drops it instead."""
        self._server.should_exit = True
        self._server.force_exit = self._server.force_exit or now

    def join(self) -> None:
        """Wait until it has ended. Handlers of signals are called meanwhile."""
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)

    def wait(self) -> int:
        """Serve until SIGTERM or Ctrl-C, answer what is on its way, and end.

        A second signal ends it at once.

        Returns:
            The number of the signal; 0 where the server ended by itself.
        """
        with self._signals() as received:
            self.join()
        return received[0] if received else 0

    @contextmanager
    def _signals(self) -> Iterator[list[int]]:
        received: list[int] = []

        def stop(signum: int, frame: FrameType | None) -> None:
            received.append(signum)
            self.stop(now=len(received) > 1)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield received
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def refuse_open_door(host: str, *, token: str | None, insecure: bool) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        ConfigError: They could reach it, and nothing says that this is meant.
    """
    if token is not None or is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            f"`--host {host}` lets other machines in, and without a token anybody: give "
            "`--token-env NAME`, stay at 127.0.0.1, or say `--insecure`."
        )
    print(f"ppo-lightning: serving anybody who reaches {host}, without a token.", file=sys.stderr)


def _listening(host: str, port: int) -> socket.socket:
    require_within("--port", port, 0, 65535)  # the system would take it modulo 65536
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"`--host {host} --port {port}` cannot be used ({error}). Give another; `--port 0` "
            "takes a free one."
        ) from error
    return listener
