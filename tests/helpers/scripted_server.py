"""A server of plain sockets that answers as badly as a test wants it to."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PATIENCE_SECONDS = 60  # a guard: no test comes near


@dataclass(frozen=True)
class Received:
    """A request, as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def items(self) -> list[dict[str, Any]]:
        return json.loads(self.body)["items"]


class Wire:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket, server: ScriptedServer) -> None:
        self.socket, self.server = connection, server
        self._read = b""

    def request(self) -> Received | None:
        """The next request, or None where the client has gone."""
        while b"\r\n\r\n" not in self._read:
            if not self._more():
                return None
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self._read) < length:
            if not self._more():
                return None
        body, self._read = self._read[:length], self._read[length:]
        method, path, _ = first.split(" ")
        return Received(method, path, headers, body)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def until_closed(self) -> None:
        """Say nothing until the client goes away."""
        while self._more():
            pass

    def _more(self) -> bool:
        chunk = self.socket.recv(65536)
        self._read += chunk
        return bool(chunk)


Behaviour = Callable[[Wire, Received], bool]
"""Answers one request; says whether the connection stays open."""


class ScriptedServer:
    """Answers the first request by the first behaviour, and so on; the last one goes on for ever.

    Connections have a thread each. ``/health`` says ready, and counts neither as a request nor in
    the script.
    """

    def __init__(self, *script: Behaviour, health: bytes | None = None) -> None:
        self.script: Sequence[Behaviour] = script
        self.requests: list[Received] = []
        self.num_connections = 0
        self.health = health or reply(b'{"status": "ready"}')
        self.num_health = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score"

    def __enter__(self) -> ScriptedServer:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # the client has gone
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.num_connections += 1
                self._open.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        wire = Wire(connection, self)
        try:
            while (request := wire.request()) is not None:
                if not self._next(request)(wire, request):
                    break
        except OSError:
            pass  # the client has gone
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def _next(self, request: Received) -> Behaviour:
        if request.method == "GET":
            self.num_health += 1
            return says(self.health)
        with self._lock:
            self.requests.append(request)
            return self.script[min(len(self.requests), len(self.script)) - 1]


# Answers


def reply(body: bytes, status: int = 200, **headers: str) -> bytes:
    """A whole answer."""
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {key.replace("_", "-"): value for key, value in headers.items()}
    lines = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    return f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + body


def says(data: bytes, *, stays: bool = True) -> Behaviour:
    """Send these bytes."""

    def behave(wire: Wire, request: Received) -> bool:
        wire.send(data)
        return stays

    return behave


def body(text: str, status: int = 200, **headers: str) -> Behaviour:
    """Answer with this text."""
    return says(reply(text.encode(), status, **headers))


def scores(*values: Any) -> Behaviour:
    """Answer with these scores, as JSON has them."""
    return body(json.dumps({"scores": list(values)}))


def numbers(wire: Wire, request: Received) -> bool:
    """Score a response by the number that it is."""
    found = [float(item["response"]) for item in request.items]
    wire.send(reply(json.dumps({"scores": found}).encode()))
    return True


def silence(wire: Wire, request: Received) -> bool:
    """Never answer."""
    wire.until_closed()
    return False


def reset(wire: Wire, request: Received) -> bool:
    """Break the connection off, as a killed process does."""
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def half(wire: Wire, request: Received) -> bool:
    """Send half of a good answer, and close."""
    whole = reply(json.dumps({"scores": [0.5] * len(request.items)}).encode())
    wire.send(whole[:-6])
    return False


def drip(seconds: float, *, of_head: bool) -> Behaviour:
    """Send a good answer byte by byte: no single read takes long, and all of them for ever."""

    def behave(wire: Wire, request: Received) -> bool:
        whole = reply(json.dumps({"scores": [0.5] * len(request.items)}).encode())
        split = 0 if of_head else whole.index(b"\r\n\r\n") + 4
        wire.send(whole[:split])
        for i in range(split, len(whole)):
            if wire.server.closing.wait(seconds):
                return False
            wire.send(whole[i : i + 1])
        return True

    return behave
