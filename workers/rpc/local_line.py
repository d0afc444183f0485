"""The gateway's end of the local transport. The rules are in ``connection.py``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from workers.protocol import StepOutputs, Up, decode_up
from workers.rpc import transport
from workers.rpc.connection import Connection, no_certificates, ours, socket_path
from workers.rpc.frames import Kind, frame, opening, read_ending
from workers.rpc.tls import TlsFiles
from workers.rpc.transport import in_parts
from workers.rpc.wire import SessionError, cancel_all

if TYPE_CHECKING:
    from workers.rpc.unsent import Unsent

RETRY_S = 0.05
"""How soon a worker that does not listen yet is tried again."""


class LocalLine(Connection):
    """The gateway's end. A ``Line``."""

    def __init__(self, address: str, secret: str | None, tls: TlsFiles | None, unsent: Unsent) -> None:
        super().__init__()
        no_certificates(tls)
        self._address = address
        self._secret = secret
        self._unsent = unsent
        self._let_in: asyncio.Future[Any] = self.loop.create_future()
        self._on_message: Callable[[Up], None] | None = None
        self._parts: Iterator[Up] = iter(())
        self._woken = False

    @property
    def up(self) -> bool:
        """Let in, and not over."""
        return self._let_in.done() and not self.over.done()

    async def open(self) -> None:
        """Connect, show the secret. Raises SessionError."""
        try:
            path = socket_path(self._address)
        except OSError as error:
            raise SessionError("unavailable", f"cannot connect to {self._address}: {error.strerror}") from None
        while True:
            try:
                await self.loop.create_unix_connection(lambda: self, path)
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                await asyncio.sleep(RETRY_S)
            except OSError as error:
                raise SessionError("unavailable", f"cannot connect to {path}: {error.strerror}") from None
            else:
                break
        if self.outlet is not None and os.geteuid() != 0 and not ours(self.outlet.socket):
            raise SessionError("unauthenticated", f"who listens at {path} is another user: it is told no secret")
        self.say(opening(self._secret))
        waiting: set[asyncio.Future[Any]] = {self._let_in, self.over}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self.up:
            raise self.over.result() or SessionError("unavailable", "the connection was closed")

    async def listen(self, on_message: Callable[[Up], None]) -> None:
        """Until then nothing is read."""
        self._on_message = on_message
        try:
            self.pause(False)
            self.pump()
            error = await asyncio.shield(self.over)
        finally:
            self._on_message = None
        if error is not None:
            raise error

    def wake(self) -> None:
        """What is sent in this turn of the loop goes out together, in the next unless ``flush`` comes before."""
        if not self._woken:
            self._woken = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send it."""
        if not self._woken:
            return
        self._woken = False
        if self.outlet is not None and not self.over.done():
            self.outlet.push()

    async def say_the_rest(self, timeout_s: float) -> None:
        """Nobody reads when the socket stays full."""
        assert self.outlet is not None
        self.outlet.push()
        drained = asyncio.create_task(self.outlet.drained())
        waiting: set[asyncio.Future[Any]] = {drained, self.over}
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(drained)

    async def close(self) -> None:
        """Close the connection."""
        self.end(None)
        if self._transport is not None:
            self._transport.abort()
            await self.lost.wait()

    def pump(self) -> None:
        """Hand on what is here, up to ``PART`` sequences; with more the rest waits for another turn of the loop."""
        left = transport.PART
        while not self.over.done() and left > 0:
            try:
                part = next(self._parts, None)
                if part is not None:
                    left -= max(1, len(part.outputs)) if isinstance(part, StepOutputs) else 1
                    if self._on_message is not None:
                        self._on_message(part)
                elif not self._next():
                    return
            except Exception as error:  # also the listener's own
                self.end(error)
        if not self.over.done():
            self.pause(True)
            self.loop.call_soon(self._read_on)

    def content(self) -> bytes:
        data = self._unsent.take()
        return frame(Kind.MESSAGE, data) if data else b""

    def _read_on(self) -> None:
        self.pause(False)
        self.pump()

    def _next(self) -> bool:
        """Take one frame; False where none is here, or nobody listens yet. Raises SessionError."""
        if self._let_in.done() and self._on_message is None:
            self.pause(True)
            return False
        taken = self.frames.take()
        if taken is None:
            return False
        kind, data = taken
        if kind is Kind.END:
            self._ended(data)
        elif not self._let_in.done():
            if kind is not Kind.OPENED:
                raise SessionError("protocol", f"{kind.name} before the session was open")
            self._let_in.set_result(None)
        elif kind is Kind.MESSAGE:
            self._parts = in_parts(_decoded(data))
            if self.pulse.idle:  # a worker that loads its model may hold the interpreter for long
                self.pulse.start()
        elif kind is Kind.PING:
            self.say(frame(Kind.PONG))
        elif kind is not Kind.PONG:
            raise SessionError("protocol", f"{kind.name} in the middle of a session")
        return True

    def _ended(self, data: bytes) -> None:
        try:
            why = read_ending(data)
        except msgspec.DecodeError as error:
            raise SessionError("protocol", f"not a message of this protocol: {error}") from None
        self.end(None if why.code == "ok" else SessionError(why.code, why.detail))


def _decoded(data: bytes) -> Up:
    try:
        return decode_up(data)
    except msgspec.DecodeError as error:
        raise SessionError("protocol", f"not a message of this protocol: {error}") from error
