"""Workers on this machine: frames over a UNIX socket, handed on in the call that read them.

Rules
- No thread, and no task per message: what is read is decoded and handed on in the same call, what is to be said is
  written by the thread that says it (``outlet.py``); all that waits for a turn of the loop is said in one frame.
- The gateway opens with version and secret and is answered before anything else is read. Until then it gets
  ``MAX_OPENING`` bytes, ``OPENING_S`` seconds and one of ``MAX_VISITORS`` places.
- The socket is the worker's own user's alone (mode 0600 before it listens); root may come too. The gateway, too, says
  its secret only to a worker of its own user or of root, unless it is root itself: in a folder that others can write to
  somebody else may have listened first.
- What is no frame, or no message, ends the session. The end of a connection in the middle of a frame is a lost
  connection like any other: its process, which may have been killed, tells more.
- Other workers (``workers.transfer``) are answered at a socket beside it, over gRPC: they move megabytes, not steps.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections import deque
from typing import cast

from workers.rpc.frames import FrameReader, Kind, frame
from workers.rpc.outlet import Outlet
from workers.rpc.pulse import Pulse
from workers.rpc.tls import TlsFiles
from workers.rpc.wire import LAST_WORDS_S, MAX_FRAME, SessionError

MAX_PATH = 104
"""Bytes of a socket's path on Linux (108), with its end and what ``local_port`` appends for other workers."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group."""


class Connection(asyncio.Protocol):
    """What both ends do alike. Belongs to the event loop, but for ``refill``."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.loop = asyncio.get_running_loop()
        self.frames = FrameReader(limit)
        self.outlet: Outlet | None = None
        self.over: asyncio.Future[Exception | None] = self.loop.create_future()
        """Done when the session is: with what broke it, or None."""
        self.lost = asyncio.Event()
        """The connection is closed."""
        self.pulse = Pulse(self.loop, self._ask, self._silent)
        self._transport: asyncio.Transport | None = None
        self._control: deque[bytes] = deque()
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        try:
            self.outlet = Outlet(transport.get_extra_info("socket").fileno(), self.loop, self.refill)
        except OSError as error:  # no descriptor is left: who came would wait for an answer for ever
            self.end(SessionError("unavailable", f"cannot write to the connection: {error.strerror}"))

    def data_received(self, data: bytes) -> None:
        self.pulse.heard_at = self.loop.time()
        self.frames.feed(data)
        self.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pulse.stop()
        if self.outlet is not None:
            self.outlet.close()
        self.lost.set()
        where = ", in the middle of a message" if len(self.frames) else ""
        self.end(SessionError("unavailable", f"the connection was lost{where}" + (f" ({exc})" if exc else "")))

    def end(self, why: Exception | None) -> None:
        """Nothing is handed on any more. Only the first reason counts."""
        if not self.over.done():
            self.over.set_result(why)
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, at the latest when what was said had ``LAST_WORDS_S`` to go out."""
        self.pulse.stop()
        if self._transport is None:
            return
        if self.outlet is not None and self.outlet.full:
            self.loop.call_later(LAST_WORDS_S, self._transport.abort)
        else:
            self._transport.abort()

    def say(self, control: bytes) -> None:
        """Send a frame ahead of what waits."""
        self._control.append(control)
        if self.outlet is not None:
            self.outlet.push()

    def pause(self, paused: bool) -> None:
        """Read on, or not."""
        if self._transport is None or self._paused is paused or self._transport.is_closing():
            return
        self._paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pump(self) -> None:
        """Take the frames that are here."""
        raise NotImplementedError

    def content(self) -> bytes:
        """Frames to send next; empty: none."""
        raise NotImplementedError

    def refill(self) -> bytes:
        """For the outlet."""
        if not self._control:
            return self.content()
        said: list[bytes] = []
        while self._control:
            said.append(self._control.popleft())
        return b"".join(said)

    def _ask(self) -> None:
        self.say(frame(Kind.PING))

    def _silent(self) -> None:
        self.end(SessionError("unavailable", "no sign of life: the process at the other end is stopped, or hangs"))


def socket_path(address: str) -> str:
    """Of ``unix:/path``. Raises OSError for a path that is too long for a socket."""
    path = address.removeprefix("unix:")
    if len(os.fsencode(path)) > MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {MAX_PATH} bytes")
    return path


def ours(connected: socket.socket) -> bool:
    """Is the process at the other end of this user, or root? Where the system tells.

    Of one that listens it is asked who it was when it began to.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] in (0, os.geteuid())


def no_certificates(tls: TlsFiles | None) -> None:
    """Raises ValueError for some: nobody would look at them."""
    if tls is not None:
        raise ValueError("a UNIX socket takes no TLS: it never leaves the machine")
