"""The worker's end of the local transport. The rules are in ``connection.py``."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from workers.rpc.connection import Connection, no_certificates, ours, socket_path
from workers.rpc.frames import VERSION, Kind, ending, frame, read_opening
from workers.rpc.listening import Listener
from workers.rpc.network import MAX_READERS, server
from workers.rpc.tls import TlsFiles
from workers.rpc.transport import Desk
from workers.rpc.wire import MAX_FRAME, SessionError, wrong_secret

if TYPE_CHECKING:
    import grpc

    from workers.rpc.reception import Reception

MAX_OPENING = 4096
OPENING_S = 5.0
MAX_VISITORS = 32
"""Connections at once, with those that are not let in yet or on their way out."""
MAX_HELD = 2**20
"""Bytes that are read ahead of a session that has not begun."""
BLOCKS_SUFFIX = ".kv"
"""Of the socket for other workers."""


class LocalPort:
    """The worker's end. A ``Port``."""

    def __init__(self, reception: Reception, tls: TlsFiles | None, blocks: grpc.RpcMethodHandler | None) -> None:
        no_certificates(tls)
        self._reception = reception
        self._blocks = blocks
        self._server: asyncio.Server | None = None
        self._listener: Listener | None = None
        self._path: Path | None = None
        self._visitors: set[_Visitor] = set()
        self.blocks_address = ""

    async def start(self, address: str) -> str:
        """Listen. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            path = socket_path(address)
            _make_room(path)
            listening.bind(path)
            os.chmod(path, 0o600)  # nobody can connect before it listens
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._visitor, sock=listening)
        except OSError as error:
            listening.close()
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from None
        self._path = Path(path)
        if self._blocks is not None:
            handlers = {"Blocks": self._blocks}
            self._listener = Listener(lambda joined: server(handlers, MAX_READERS, joined), None)
            self.blocks_address = await self._listener.start(address + BLOCKS_SUFFIX)
        return address

    async def stop(self) -> None:
        """Close the socket and every session."""
        if self._server is not None:
            self._server.close()
        visitors = list(self._visitors)
        tasks = [visitor.task for visitor in visitors if visitor.task is not None]
        for visitor in visitors:
            visitor.end(None)
        await asyncio.gather(*tasks, *(visitor.lost.wait() for visitor in visitors), return_exceptions=True)
        if self._listener is not None:
            await self._listener.stop()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _visitor(self) -> _Visitor:
        return _Visitor(self._reception, self._visitors)


class _Visitor(Connection):
    """One connection to a worker. A ``Caller``."""

    def __init__(self, reception: Reception, others: set[_Visitor]) -> None:
        super().__init__(MAX_OPENING)
        self.task: asyncio.Task[None] | None = None
        """The session, once it showed the secret."""
        self._reception = reception
        self._others = others
        self._desk: Desk | None = None
        self._enough: asyncio.Future[SessionError | None] = self.loop.create_future()
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.outlet is None:
            return
        if len(self._others) >= MAX_VISITORS or not ours(self.outlet.socket):
            self.end(None)
            return
        self._others.add(self)
        late = SessionError("deadline_exceeded", f"nothing was said within {OPENING_S:g} s")
        self._late = self.loop.call_later(OPENING_S, self._answer, late)

    def end(self, why: Exception | None) -> None:
        """The connection is of no use any more: the session ends, if there is one."""
        if self.over.done():
            return
        super().end(why)
        self._desk = None
        if self._late is not None:
            self._late.cancel()
        if self.task is not None:
            self.task.cancel()
        else:
            self._others.discard(self)

    def pump(self) -> None:
        """Take what is here, once the session is at it; until then only the opening."""
        try:
            while not self.over.done() and (self.task is None or self._desk is not None):
                taken = self.frames.take()
                if taken is None:
                    return
                if self._desk is None:
                    self._enter(*taken)
                else:
                    self._take(self._desk, *taken)
        except SessionError as error:
            if self.task is None:
                self._answer(error)
            else:
                self._leave(error)
        if len(self.frames) > MAX_HELD:
            self.pause(True)

    def content(self) -> bytes:
        """From any thread."""
        desk = self._desk
        if desk is None:
            return b""
        finishing = desk.finishing  # asked before take(): what was put until then goes out
        if frames := desk.take():
            return b"".join([frame(Kind.MESSAGE, data) for data in frames])
        if finishing:
            self.loop.call_soon_threadsafe(self._leave, None)
        return b""

    async def let_in(self) -> None:
        self.say(frame(Kind.OPENED))

    async def greet(self, hello: bytes) -> None:
        self.say(frame(Kind.MESSAGE, hello))

    async def talk(self, desk: Desk) -> None:
        self._desk = desk
        self.pulse.start()
        self.pause(False)
        self.pump()
        self.news()
        try:
            error = await self._enough
        finally:
            self._desk = None
        if error is not None:
            raise error

    def news(self) -> None:
        if self._desk is not None and self.outlet is not None:
            self.outlet.push()

    async def _serve(self) -> None:
        why: SessionError | None = SessionError("internal", "the worker's session failed")
        try:
            await self._reception.serve(self)
            why = None
        except SessionError as error:
            why = error
        finally:
            self.task = None
            self._others.discard(self)
            self._answer(why)

    def _answer(self, why: SessionError | None) -> None:
        """The last word."""
        if not self.over.done():
            self.say(ending("ok", "") if why is None else ending(why.code, why.detail))
            self.end(why)

    def _leave(self, why: SessionError | None) -> None:
        """End the talk."""
        self._desk = None
        if not self._enough.done():
            self._enough.set_result(why)

    def _enter(self, kind: Kind, data: bytes) -> None:
        """The first frame. Raises SessionError."""
        try:
            said = read_opening(data) if kind is Kind.OPEN else None
        except msgspec.DecodeError:
            said = None
        if said is None:
            raise SessionError("protocol", "a session begins otherwise: do both ends run the same release?")
        if not self._reception.admits(said.secret.encode()):
            raise wrong_secret()
        if said.version != VERSION:
            raise SessionError("protocol", f"frames of version {said.version}, here {VERSION}: run the same release")
        if self._late is not None:
            self._late.cancel()
        self.frames.limit = MAX_FRAME
        self.task = self.loop.create_task(self._serve())

    def _take(self, desk: Desk, kind: Kind, data: bytes) -> None:
        """A frame of the session. Raises SessionError."""
        if kind is Kind.MESSAGE:
            desk.heard(data)
        elif kind is Kind.PING:
            self.say(frame(Kind.PONG))
        elif kind is not Kind.PONG:
            raise SessionError("protocol", f"{kind.name} in the middle of a session")


def _make_room(path: str) -> None:
    """Remove a socket that nobody listens at any more. Raises OSError when somebody does."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except BlockingIOError:  # somebody does, and takes nobody in
            pass
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "somebody listens there")
