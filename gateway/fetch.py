"""The HTTP GET that policies are lent (a JWKS document, say): JSON, bounded in size and time, in a thread.

Rules
- Only http and https, redirects within them and at most the library's ten, and none from https to http: what a document
  says is as safe as the least safe step to it. Certificates are verified as the system does.
- A fetch is over after ``TIMEOUT_S``, whatever the server does: one that sends a byte now and then would hold its
  thread for ever, and the next fetch another one, until nothing in this process got a thread any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 4.0
MAX_BYTES = 2**20


async def fetch_json(url: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The parsed document. Raises OSError when it cannot be had, ValueError when it is no JSON or too large."""
    return await asyncio.to_thread(_get, url, timeout_s)


def _get(url: str, timeout_s: float) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https URLs are fetched")
    request = urllib.request.Request(url, headers={"accept": "application/json", "user-agent": "forebay"})  # noqa: S310
    with _Deadline(timeout_s) as deadline:
        try:
            with _opener(deadline).open(request, timeout=timeout_s) as answer:
                body = answer.read(MAX_BYTES + 1)
                missing = answer.length
        except urllib.error.HTTPError as error:
            with error:  # it holds the connection
                raise OSError(f"answered with status {error.code}") from None
        except http.client.HTTPException as error:
            raise OSError(f"broke off its answer ({type(error).__name__})") from None
    if deadline.over:
        raise OSError(f"did not answer within {timeout_s:g} s")
    if len(body) > MAX_BYTES:
        raise ValueError(f"the document is larger than {MAX_BYTES} bytes")
    if missing:
        raise OSError(f"broke off its answer, {missing} bytes before its end")
    return json.loads(body)


class _Deadline:
    """Hangs up all connections of one fetch when its time is over, wherever the fetch waits."""

    def __init__(self, seconds: float) -> None:
        self.over = False
        self._lines: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for line in self._lines:
                line.close()
            self._lines.clear()

    def watch(self, line: socket.socket) -> None:
        """A connection was made. TLS takes the socket itself over, so only another handle of it is good for this."""
        with self._lock:
            self._lines.append(line.dup())
        if self.over:
            self._end()

    def _end(self) -> None:
        self.over = True
        with self._lock:
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)


class _Line(http.client.HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _SecureLine(http.client.HTTPSConnection, _Line):
    """Its handshake comes after ``_Line.connect``, and is watched too."""


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._lines = _watched(_Line, deadline)

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._lines, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._lines = _watched(_SecureLine, deadline)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(self._lines, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.full_url.startswith("https://") and not newurl.lower().startswith("https://"):
            raise urllib.error.URLError("it redirects from https to an address without")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _watched(kind: type[_Line], deadline: _Deadline) -> Callable[..., _Line]:
    def make(host: str, **options: Any) -> _Line:
        line = kind(host, **options)
        line.deadline = deadline
        return line

    return make


def _opener(deadline: _Deadline) -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Http(deadline),
        _Https(deadline),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener
