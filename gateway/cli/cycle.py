"""One answer as bytes, as uvicorn writes it, its head in one go: uvicorn searches every name and every value by itself.

Rules
- What uvicorn refuses is refused: a control character in a header, a body that is not as long as was said, messages out
  of order.
- Only what differs is here; the rest of a request's cycle is uvicorn's.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NOT_YET_A_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"A-Z]')
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SPOKEN = frozenset({b"content-length", b"transfer-encoding", b"connection"})
"""Headers that uvicorn goes by."""


class Cycle(RequestResponseCycle):
    """Takes the place of uvicorn's."""

    async def send(self, message: Any) -> None:
        """ASGI."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.body" and self.response_started and not self.response_complete:
            self._write(message)
        elif message["type"] == "http.response.start" and not self.response_started:
            self._begin(message)
        else:
            raise RuntimeError(f"the ASGI message {message['type']!r} is out of order")

    def _begin(self, message: Message) -> None:
        """Status and headers."""
        self.response_started = True
        self.waiting_for_100_continue = False
        headers = [*self.default_headers, *message.get("headers", ())]
        names, values = zip(*headers, strict=True) if headers else ((), ())
        if _NOT_YET_A_NAME.search(b"".join(names)):
            headers = [(name.lower(), value) for name, value in headers]
            names = tuple(name for name, _ in headers)
        if _NOT_YET_A_NAME.search(b"".join(names)) or _NO_VALUE.search(b"".join(values)):
            raise RuntimeError("a header's name or value has a character that it may not have")
        told = [] if _SPOKEN.isdisjoint(names) else [header for header in headers if header[0] in _SPOKEN]
        content = [STATUS_LINE[message["status"]]]
        for name, value in headers:
            content += (name, b": ", value, b"\r\n")
        closes = False
        for name, value in told:
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.expected_content_length = 0
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in [token.lower().strip() for token in value.split(b",")]:
                self.keep_alive, closes = False, True
        if not self.keep_alive and not closes:
            content.append(b"connection: close\r\n")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and message["status"] not in (204, 304):
            self.chunked_encoding = True
            content.append(b"transfer-encoding: chunked\r\n")
        content.append(b"\r\n")
        self.transport.write(b"".join(content))

    def _write(self, message: Message) -> None:
        """A part of the body."""
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            content = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(content if more else content + b"0\r\n\r\n")
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the body is longer than its content-length")
            self.transport.write(body)
        if more:
            return
        if self.expected_content_length:
            raise RuntimeError("the body is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
