"""The edge: pure ASGI around the routes, so that every answer, also a stream and an error, has the same manners.

``guard(app)``: a request id, limits (headers, body, encodings), errors, around the routes.

Rules
- Limits are checked before anything is parsed; a body is counted as it arrives, whatever Content-Length says.
- Compressed bodies are refused (415): nothing here ever inflates what a caller sent.
- No error tells a path, class, address or text of an exception; the log has its type, place and the request id.
- Nothing here buffers. After an early refusal the rest of the body is read and thrown away, within bounds: a client
  that is cut off while it sends would never see the refusal.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from gateway import log
from gateway.errors import ApiError, bad_request, internal, too_large
from gateway.ids import new_id

MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
DRAIN_BYTES = 32 * 2**20
DRAIN_S = 5.0
GONE = "forebay.gone"
"""An ASGI extension: calls back when the connection is lost (``Tell``)."""
Tell = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes whom to call, and returns what makes it call nobody."""
LAST = "forebay.last"
"""An ASGI extension: says whether all requests have begun that the server read in this turn of the event loop."""
Last = Callable[[], bool]
_REQUEST_ID = "forebay.request_id"
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def guard(app: ASGIApp, *, max_body_bytes: int) -> ASGIApp:
    """The whole edge around ``app``."""
    return _Guard(app, max_body_bytes)


def request_id(scope: Scope) -> str:
    """The id of this request: the caller's, if it sent a sane one, else ours."""
    return str(scope[_REQUEST_ID])


class _Guard:
    """Refuses what is too much or encoded, and turns what the routes raise into an answer.

    One layer for all of it: each layer of its own would cost every message of every stream a call.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app = app
        self._max_body = max_body
        self._log = log.get("gateway.http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = _Head(scope["headers"])
        scope[_REQUEST_ID] = head.request_id
        exchange = _Exchange(head, receive, send, self._max_body)
        try:
            refusal = head.refusal(self._max_body)
            if refusal is None:
                await self._app(scope, exchange.receive, exchange.send)
                return
        except ClientDisconnect:
            return
        except ApiError as error:
            refusal = error
        except HTTPException as error:
            refusal = from_http(error)
        except Exception as error:
            started, failure = exchange.started, log.describe(error)
            self._log.error("request_failed", request_id=head.request_id, started=started, failure=failure)
            refusal = internal()
        if not exchange.started:
            # Returning without completing a started answer makes the server cut the connection: the caller
            # sees a broken stream, never a complete one.
            await send_error(exchange.send, refusal)


class _Head:
    """What the edge goes by in a request's headers, read in one pass."""

    __slots__ = ("_count", "_encoded", "_lengths", "_size", "chunked", "request_id")

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._count = len(headers)
        self._size = 0
        self._encoded = False
        self._lengths: list[bytes] = []
        self.chunked = False
        given: bytes | None = None
        for name, value in headers:
            self._size += len(name) + len(value)
            if name == b"content-length":
                self._lengths.append(value)
            elif name == b"transfer-encoding":
                self.chunked = True
            elif name == b"content-encoding":
                self._encoded = self._encoded or value.strip().lower() not in (b"", b"identity")
            elif name == b"x-request-id" and given is None:
                given = value
        sane = given is not None and _SANE_ID.fullmatch(given)
        self.request_id = given.decode("ascii") if given is not None and sane else f"req_{new_id()}"

    @property
    def has_body(self) -> bool:
        """Whether a body follows, going by what they say."""
        return self.chunked or (bool(self._lengths) and self._lengths[-1].strip(b"0") != b"")

    def refusal(self, max_body: int) -> ApiError | None:
        """Why it is refused whatever the body holds; None: it is not."""
        if self._count > MAX_HEADERS or self._size > MAX_HEADER_BYTES:
            return bad_request(
                f"At most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of them are accepted, "
                f"got {self._count} with {self._size} bytes.",
                code="headers_too_large",
                status=431,
            )
        if self._encoded:
            return bad_request("Send the body uncompressed.", code="unsupported_encoding", status=415)
        if any(not value.isdigit() or len(value) > 18 or int(value) > max_body for value in self._lengths):
            return too_large(max_body)
        return None


class _Exchange:
    """One request's messages: its body is counted on the way in, and thrown away when the answer does not wait for it;
    the answer gets its id.
    """

    __slots__ = ("_id", "_limit", "_pending", "_receive", "_received", "_send", "started")

    def __init__(self, head: _Head, receive: Receive, send: Send, limit: int) -> None:
        self._id = head.request_id.encode()
        self._pending = head.has_body
        self._limit = limit
        self._received = 0
        self._receive = receive
        self._send = send
        self.started = False
        """The answer has begun."""

    async def receive(self) -> Message:
        """The next message. Raises ApiError 413 once there is more than the limit."""
        message = await self._receive()
        self._count(message)
        if self._received > self._limit:
            raise too_large(self._limit)
        return message

    def _count(self, message: Message) -> None:
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._pending = message.get("more_body", False)
        else:
            self._pending = False

    async def send(self, message: Message) -> None:
        """Pass the answer on; drain what the caller is still sending before the answer is complete."""
        if message["type"] == "http.response.start":
            self.started = True
            headers = [header for header in message.get("headers", ()) if header[0] != b"x-request-id"]
            headers.append((b"x-request-id", self._id))
            message = {**message, "headers": headers}
            if self._pending:
                MutableHeaders(scope=message)["connection"] = "close"
        elif self._pending and message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                while self._pending and self._received <= self._limit + DRAIN_BYTES:
                    self._count(await self._receive())
        except TimeoutError:
            self._pending = False


def from_http(error: HTTPException) -> ApiError:
    """A routing refusal (404, 405) in the API's shape."""
    texts = {404: "There is no such endpoint here.", 405: "This endpoint does not take that method."}
    codes = {404: "unknown_endpoint", 405: "method_not_allowed"}
    made = _Routed(
        error.status_code,
        texts.get(error.status_code, "The request cannot be served."),
        type="invalid_request_error",
        code=codes.get(error.status_code, "bad_request"),
    )
    made.extra = dict(error.headers or {})
    return made


class _Routed(ApiError):  # noqa: N818 - an ApiError like any other, with the router's headers (Allow)
    extra: Mapping[str, str] = {}

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **self.extra}


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for ``error``; ``headers`` (rate limits, say) are added to its own."""
    body = json.dumps(error.body()).encode()
    return Response(body, error.status, {**(headers or {}), **error.headers()}, "application/json")


async def send_error(send: Send, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
    """Send ``error`` as the whole answer."""

    async def no_receive() -> Message:
        return {"type": "http.disconnect"}

    await error_response(error, headers)({"type": "http"}, no_receive, send)


def exception_handlers() -> dict[Any, ExceptionHandler]:
    """For ``Starlette(exception_handlers=…)``: without them it answers in plain text, out of reach of ``Errors``."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return error_response(from_http(error))
        return error_response(error if isinstance(error, ApiError) else internal())

    return {HTTPException: handle, ApiError: handle, Exception: handle}


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 past ``limit`` bytes and ClientDisconnect when the caller goes away."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return b"".join([*chunks, chunk]) if chunks else bytes(chunk)
        chunks.append(chunk)


async def watch_disconnect(receive: Receive) -> None:
    """Return when the caller is gone. Only legal after the whole body was read; run it as a task beside the work."""
    while (await receive())["type"] != "http.disconnect":
        pass


def when_gone(scope: Scope, receive: Receive, left: Callable[[], None]) -> Callable[[], None]:
    """Have ``left`` called when the caller goes away; what is returned ends the watch. Legal after the whole body.

    Our own listener calls it by itself (``GONE``). Of another server it has to be asked, by a task beside the work.
    """
    tell: Tell | None = scope.get("extensions", {}).get(GONE)
    if tell is not None:
        return tell(left)

    def ended(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            watch.exception()  # looked at, so that nobody warns of it
            left()

    watch = asyncio.create_task(watch_disconnect(receive), name="disconnect watch")
    watch.add_done_callback(ended)
    return partial(_cancel, watch)


def nobody_follows(scope: Scope) -> bool:
    """Whether no other request is about to begin in this turn of the event loop; False where nobody says."""
    last: Last | None = scope.get("extensions", {}).get(LAST)
    return last is not None and last()


def _cancel(watch: asyncio.Task[None]) -> None:
    watch.cancel()


async def measure_loop_lag(
    report: Callable[[float], None], interval_s: float = 0.25, clock: Callable[[], float] = time.monotonic
) -> None:
    """Report for ever by how many seconds the event loop was late for a timer; cancel to end."""
    while True:
        before = clock()
        await asyncio.sleep(interval_s)
        report(max(0.0, clock() - before - interval_s))
