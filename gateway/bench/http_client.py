"""A small HTTP/1.1 client for streams: it shares the machine with the server that it measures, so it must be light.

Rules
- Bytes are handed on with the time at which they arrived, not when somebody got round to reading them; a request is
  timed from the moment at which it goes out.
- A connection carries one exchange at a time and is kept for the next one if both sides allow.
- A kept connection that the server closed meanwhile is replaced once, as long as nothing of the answer has come.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

Sink = Callable[[bytes, float], None]
"""Takes a piece of a successful answer's body and ``time.perf_counter`` of its arrival."""


class HttpError(Exception):
    """An answer that is no success, or none at all. ``code`` is short and bounded: ``http_429``, ``connection``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Exchange:
    """One request and what comes of it."""

    sink: Sink
    done: asyncio.Future[None]
    status: int = 0
    framed: bool = False
    """The answer says where it ends; otherwise the end of the connection is its end."""
    begun: bool = False
    sent: float = 0.0
    """``time.perf_counter`` when it went out."""
    ended: float = 0.0
    """And when the last of its answer arrived."""
    refusal: list[bytes] = field(default_factory=list)
    """The body of an answer that is no success."""


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: Exchange | None = None
        self._arrived = 0.0
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # No isinstance: uvloop has a transport class of its own.
        self._transport = cast(asyncio.Transport, transport)
        self.reusable = True

    def start(self, request: bytes, exchange: Exchange) -> None:
        """Send; the exchange's future tells the end."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = exchange
        exchange.sent = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Drop it."""
        self.reusable = False
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        if self._exchange is None or self._parser is None:
            self.close()  # nobody asked
            return
        self._exchange.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError("connection", f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        exchange = self._exchange
        if exchange is None:
            return
        if exc is None and exchange.status and not exchange.framed:
            self._end()
            return
        self._fail(HttpError("connection", f"the connection ended before the answer did ({exc or 'closed'})"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        if self._exchange is not None and name.lower() in (b"content-length", b"transfer-encoding"):
            self._exchange.framed = True

    def on_headers_complete(self) -> None:
        """httptools: the status is known."""
        if self._exchange is not None and self._parser is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status >= 300:
            exchange.refusal.append(body)
        else:
            exchange.sink(body, self._arrived)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        if self._parser is not None and not self._parser.should_keep_alive():
            self.reusable = False
        self._end()

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.done.done():
            exchange.ended = self._arrived
            exchange.done.set_result(None)

    def _fail(self, error: HttpError) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(error)


class HttpClient:
    """Requests to one server. Use it in one event loop and ``close`` it."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for a URL that is not http(s)."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is not http://host:port or https://host")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")
        self._idle: list[_Connection] = []

    async def stream(
        self, method: str, path: str, body: bytes, sink: Sink, *, headers: dict[str, str], timeout_s: float
    ) -> Exchange:
        """Send one request; its successful answer goes to ``sink``. Returns what came of it.

        Raises HttpError with a code: the status, ``connection``, or ``timeout`` after ``timeout_s`` seconds.
        """
        request = self._encode(method, path, body, headers)
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self._exchange(request, sink)
        except TimeoutError:
            raise HttpError("timeout", f"no end of the answer within {timeout_s:g} s") from None
        if exchange.status >= 300:
            text = b"".join(exchange.refusal)[:2000].decode(errors="replace")
            raise HttpError(f"http_{exchange.status}", text or f"status {exchange.status}")
        return exchange

    async def get(self, path: str, *, headers: dict[str, str], timeout_s: float = 10.0) -> bytes:
        """The body of a GET. Raises HttpError."""
        pieces: list[bytes] = []
        await self.stream("GET", path, b"", lambda data, _: pieces.append(data), headers=headers, timeout_s=timeout_s)
        return b"".join(pieces)

    def close(self) -> None:
        """Drop kept connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: bytes, sink: Sink) -> Exchange:
        while True:
            connection, kept = await self._connection()
            exchange = Exchange(sink, asyncio.get_running_loop().create_future())
            try:
                connection.start(request, exchange)
                await exchange.done
            except HttpError:
                connection.close()
                if kept and not exchange.begun:
                    continue
                raise
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return exchange

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            kept = self._idle.pop()
            if kept.reusable:
                return kept, True
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise HttpError("connection", f"{self._host}:{self._port}: {error}") from None
        return connection, False

    def _encode(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        fields = {"host": self._authority, "content-length": str(len(body)), **headers}
        if body:
            fields["content-type"] = "application/json"
        for name, value in fields.items():
            if any(mark in name + value for mark in "\r\n\0"):
                raise ValueError(f"header {name!r} holds a line break")
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self._path}{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


class EventReader:
    """Server-sent events: the ``data`` of each, from pieces that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the lines that are whole now; comments and other fields are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
