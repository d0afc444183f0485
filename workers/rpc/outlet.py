"""Writes to a socket from any thread, without blocking and without a turn of the event loop.

The thread that has something to say says it: to wake the loop for each message would cost a system call here, a
context switch, and one more call there. Only what the socket does not take at once waits for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable


class Outlet:
    """One socket's way out."""

    def __init__(self, descriptor: int, loop: asyncio.AbstractEventLoop, refill: Callable[[], bytes]) -> None:
        """``descriptor`` is duplicated: whoever owns it may close it. ``refill`` gives what to send next, empty for
        nothing; it is called on the thread of ``push``, or on the loop's when the socket was full."""
        self.socket = socket.socket(fileno=os.dup(descriptor))
        self.socket.setblocking(False)
        self._loop = loop
        self._refill = refill
        self._lock = threading.Lock()
        self._rest: memoryview | None = None
        self._full = False
        self._closed = False
        self._emptied = asyncio.Event()

    @property
    def full(self) -> bool:
        """The socket takes no more for now."""
        return self._full

    def push(self) -> None:
        """Send what there is. What goes wrong is the reader's to find: it is told that the connection is lost."""
        with self._lock:
            if not self._full and not self._closed:
                self._full = self._send()
                if self._full:
                    with contextlib.suppress(RuntimeError):  # the loop is closed: so is the socket, soon
                        self._loop.call_soon_threadsafe(self._watch)

    async def drained(self) -> None:
        """Return when the socket has taken all that was pushed."""
        while self._full:
            self._emptied.clear()
            await self._emptied.wait()

    def close(self) -> None:
        """Send nothing more. On the loop; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._rest = None
        with contextlib.suppress(RuntimeError):
            self._loop.remove_writer(self.socket)
        self.socket.close()

    def _send(self) -> bool:
        """Until there is nothing left, or the socket is full: then True."""
        while True:
            data = self._rest if self._rest is not None else memoryview(self._refill())
            if not data:
                return False
            try:
                sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._rest = None
                return False
            if sent < len(data):
                self._rest = data[sent:]
                return True
            self._rest = None

    def _watch(self) -> None:
        with self._lock:
            if not self._closed:
                self._loop.add_writer(self.socket, self._writable)

    def _writable(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._full = self._send()
            if not self._full:
                self._loop.remove_writer(self.socket)
                self._emptied.set()
