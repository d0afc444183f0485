"""One HTTP listener: uvicorn with its own socket, without its signal handling, and with limits it does not have.

Rules
- Sockets are bound before anything is started, so that a taken port is one clear message and no half-started process.
- uvicorn must not own signals: it raises them again after its shutdown, and the process would end by SIGTERM
  instead of with exit code 0. ``serve`` decides when a listener stops.
- Headers are limited while they arrive (httptools has no limit): bytes, count and time. A connection that breaks a
  limit is answered in the API's error shape and closed; where answers to earlier requests are under way it is closed
  behind them, since the bytes of a refusal would land inside an answer.
- A request that offers an upgrade (Java's HTTP client offers h2c with each) is served as HTTP/1.1, with its body.
- An HTTP/1.0 client knows no chunks: an answer of unknown length ends with its connection.
- A peer that takes nothing any more loses its connection after ``STALLED_PEER_S``: closing alone waits for it for ever.
- A request learns from its listener that its caller has gone (``GONE``), and waits for nobody to be told; and whether
  it is the last of those that were read in one turn of the event loop (``LAST``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.cli.cycle import Cycle
from gateway.cli.output import UserError
from gateway.http.middleware import GONE, LAST

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
HEADER_TIMEOUT_S = 30.0
STALLED_PEER_S = 120
SLICE_BYTES = 4096
"""What the parser is fed at once. Where in it a request begins is not told: headers are counted to within a slice."""

_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def bind(host: str, port: int, path: str) -> socket.socket:
    """A bound TCP socket. ``path`` is the YAML path of the listener, for the message.

    Raises UserError when the port is taken, not allowed, or the host is not one of this machine.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UserError(
            f"{path}.host: {host!r} is not a host name or address of this machine ({error.strerror})"
        ) from None
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_PEER_S * 1000)
    bound.setblocking(False)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(_bind_problem(error, host, port, path)) from None
    return bound


def _bind_problem(error: OSError, host: str, port: int, path: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{path}.port: {port} on {host} is already taken. Stop the program that listens there, or set another "
            f"port (0 picks a free one)."
        )
    if error.errno == errno.EACCES:
        return f"{path}.port: {port} needs privileges this user does not have. Use a port from 1024 up."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{path}.host: {host!r} is not an address of this machine."
    return f"{path}: cannot listen on {host}:{port}: {error.strerror}"


def url_of(bound: socket.socket, *, tls: bool = False) -> str:
    """``http://host:port`` under which this machine reaches the socket; ``https`` with ``tls``."""
    scheme = "https" if tls else "http"
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Begun:
    """Counts requests whose tasks are made and whose first step is not over: several only where one turn of the event
    loop read several, since that step comes in the next.
    """

    def __init__(self) -> None:
        self._first_steps = 0

    def last(self) -> bool:
        """For a request in its first step, or later: nobody else is about to begin."""
        return self._first_steps <= 1

    def begins(self, loop: asyncio.AbstractEventLoop) -> None:
        """A request's task has just been made: what is called soon comes behind its first step."""
        self._first_steps += 1
        loop.call_soon(self._began)

    def _began(self) -> None:
        self._first_steps -= 1


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on headers; errors below the application are JSON as everywhere else."""

    def __init__(self, begun: _Begun, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._begun = begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock of the first request's headers."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._upgrade_head: bytes | None = None
        self._closing_behind = False
        self._lost = False
        self._left: Callable[[], None] | None = None
        self._extensions = {GONE: self._tell, LAST: self._begun.last}
        self._expect_headers()
        self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and tell the request that runs."""
        self._timer.cancel()
        self._lost = True
        super().connection_lost(exc)
        if self._left is not None:
            self._left()

    def _tell(self, left: Callable[[], None]) -> Callable[[], None]:
        """``GONE``, for the one request that runs."""
        if self._lost:
            self.loop.call_soon(left)
        self._left = left
        return partial(self._forget, left)

    def _forget(self, left: Callable[[], None]) -> None:
        if self._left is left:
            self._left = None

    def _look(self) -> None:
        """Is the peer late? One timer for all of a connection: setting one per request costs as much as parsing it.

        It is never set for longer than the shortest limit, so what begins meanwhile is not late before it rings.
        """
        limit_s = HEADER_TIMEOUT_S if self._in_headers else self.timeout_keep_alive
        left_s = HEADER_TIMEOUT_S if self._waits_since is None else self._waits_since + limit_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(min(left_s, HEADER_TIMEOUT_S), self._look)
        elif self._in_headers:
            self._headers_late()
        elif not self.transport.is_closing():
            self.transport.close()

    def _expect_headers(self) -> None:
        self._waits_since: float | None = self.loop.time()
        self._in_headers = True
        self._pending_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Count what arrives while headers are incomplete, which the parser would buffer without end."""
        view = memoryview(data)
        for start in range(0, len(data), SLICE_BYTES):
            if self._closing_behind or self.transport.is_closing():
                return
            self._take(view[start : start + SLICE_BYTES])

    def _take(self, piece: memoryview) -> None:
        try:
            self._parse(piece)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._pending_bytes += len(piece)
            if self._pending_bytes > MAX_HEADER_BYTES + SLICE_BYTES:  # exact once they are complete
                self._refuse(431, f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")
        elif self.cycle is None or self.cycle.response_complete:
            self._expect_headers()  # blank lines between two requests: their time counts as the next one's

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. It takes a request that offers an upgrade for one without a body, and stops: so such a
        request's head goes to a fresh parser without the offer, and what follows it after that.

        Raises httptools.HttpParserError.
        """
        rest = data
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                head, self._upgrade_head = self._upgrade_head, None
                rest = rest[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
                self.parser.feed_data(head or b"")
            else:
                return

    def on_message_begin(self) -> None:
        """A new request on this connection."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]  # ASGI leaves open what they hold
        self._expect_headers()

    def on_headers_complete(self) -> None:
        """Start the application, unless the headers broke a limit or come once more."""
        if self.parser.should_upgrade():
            self._upgrade_head = self._head_without_upgrade()
            return
        self._in_headers = False
        self._waits_since = None
        size = len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse(431, f"At most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of them are accepted.")
            raise ValueError("headers over the limit")  # stops the parser; the answer is already on its way
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] in ("1.0", "0.9"):
            app = _ended_by_close(app, cycle)
        cycle.__class__ = Cycle
        super()._start_asgi_task(cycle, app)
        self._begun.begins(self.loop)

    def on_response_complete(self) -> None:
        """Serve what is next, or wait for it."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._in_headers:
            self._waits_since = self.loop.time()

    def on_message_complete(self) -> None:
        """The request is whole, unless it comes once more."""
        if self._upgrade_head is None:
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """The request line and the headers, without what offers an upgrade."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # an upgrade by its nature
            raise ValueError("this is no proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(part for part in value.split(b",") if part.strip().lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read."""
        if not self.transport.is_closing():
            self._refuse(400, msg)

    def _headers_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"No complete request within {HEADER_TIMEOUT_S:.0f} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way and (self.pipeline or cycle.response_started or not cycle.more_body):
            self._closing_behind = True
            cycle.keep_alive = False
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "bad_http"}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _ended_by_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """``app`` for a client without chunks: where the answer says no length, it is told to expect exactly what comes."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        open_ended = False

        async def unchunked(message: Message) -> None:
            nonlocal open_ended
            if message["type"] == "http.response.start":
                open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if open_ended:
                    cycle.chunked_encoding = False
            elif open_ended:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unchunked)

    return told


class Listener(uvicorn.Server):
    """A running listener for one application."""

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        max_connections: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            self._limited(app) if max_connections else app,
            interface="asgi3",
            http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, _Begun())),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=75,
            # Cut streams have had their error event by then (the gateway's drain); this only bounds slow readers.
            timeout_graceful_shutdown=2,
        )
        config.load()
        config.ssl = tls  # a context of ours: its certificate is renewed while the listener runs
        super().__init__(config)
        self._bound = bound
        self._max_connections = max_connections
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections. Returns when the listener does."""
        self._task = asyncio.create_task(self.serve(sockets=[self._bound]), name="listener")
        while not self.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def stop(self, *, force: bool = False) -> None:
        """Close the socket and the connections; requests that still run get two seconds (none with ``force``)."""
        self.should_exit = True
        self.force_exit = self.force_exit or force
        if self._task is not None:
            await self._task

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    def _limited(self, app: ASGIApp) -> ASGIApp:
        def limited(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            limit = self._max_connections
            if limit is None or len(self.server_state.connections) <= limit:
                return app(scope, receive, send)
            return _send_json(send, 503, _BUSY)

        return limited


_BUSY = {
    "error": {
        "message": "Too many connections. Retry later.",
        "type": "service_unavailable",
        "param": None,
        "code": "too_many_connections",
    }
}


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
