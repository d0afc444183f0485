"""An answer's head and the first piece of its body in one write: uvicorn makes two.

A write is a system call that wakes the peer. One less per answer: what that saves was within the noise of what a
request costs (``gateway/DESIGN.md``).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class HeadWithBody:
    """What one request's cycle writes to instead of its transport, until its head is out.

    The head waits for the body, but for no longer than a turn of the event loop: an application may begin its answer
    and have nothing to say yet. Not for requests with HEAD, whose answers never have a body.
    """

    __slots__ = ("_cycle", "_head", "_loop", "_timer", "_transport")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._head: bytes | None = None
        self._timer: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """The first write after the answer was started is its head (100 Continue comes before that)."""
        if self._head is not None:
            self._out(self._head + data)
        elif self._cycle.response_started:
            self._head = data
            self._timer = self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close behind what was written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing that is written arrives any more."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head is not None:
            self._out(self._head)

    def _out(self, data: bytes) -> None:
        """Write the head, and step out of the way."""
        self._head = None
        self._cycle.transport = self._transport
        if self._timer is not None:
            self._timer.cancel()
        if not self._transport.is_closing():
            self._transport.write(data)
