"""The worker's end of the stream. The rules are in ``workers.rpc``."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec

from workers.protocol import AdapterAnswer, Cancel, Down, Generate, Hello, Purged, StepOutputs, decode_down, encode
from workers.rpc.listening import Listener
from workers.rpc.outbox import Outbox, frames
from workers.rpc.tls import TlsFiles
from workers.rpc.wire import MAX_FRAME, OPEN_KEY, ORPHAN_WAIT_S, SECRET_KEY, SERVER_OPTIONS, SERVICE, cancel_all

MAX_SESSIONS = 16
"""Of gateways, with those that are on their way out."""
MAX_READERS = 1024
"""Other workers' calls at once."""
MAX_REASON = 2000
"""Characters; a status travels in a header."""


class WorkerServer:
    """The worker's end. All methods but ``publish`` and ``purged`` belong to the event loop's thread."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[Down], None],
        *,
        secret: str | None = None,
        tls: TlsFiles | None = None,
        blocks: grpc.RpcMethodHandler | None = None,
    ) -> None:
        """``address``: ``unix:/path`` or ``host:port`` (port 0 picks one). ``on_message`` must not block or raise.

        It gets what the gateway sends, and a ``Cancel`` for every request of a session that ended. ``tls``: only
        clients with a certificate are talked to. ``blocks``: how other workers are answered (``workers.transfer``).
        Raises ValueError where the port would be open to anybody.
        """
        if secret is not None and not (secret and secret.isascii() and secret.isprintable()):
            raise ValueError("the worker's secret must be one or more printable ASCII characters")
        if secret is None:
            _require_private_socket(address)
        self.address = address
        self._on_message = on_message
        self._secret = secret.encode() if secret is not None else None
        self._blocks = blocks
        self._listener = Listener(self._made, tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending = asyncio.Event()
        self._outbox = Outbox(self._wake)
        self._hello: asyncio.Future[Hello] | None = None
        self._session: _Session | None = None
        self._takeover = asyncio.Lock()

    @property
    def live(self) -> list[str]:
        """Requests of the open session that have not ended."""
        return self._outbox.live

    @property
    def connected(self) -> bool:
        """Is there a session?"""
        return self._session is not None

    async def start(self) -> None:
        """Listen. Sets ``address`` to the real one. Raises OSError when it cannot."""
        self._loop = asyncio.get_running_loop()
        self._hello = self._loop.create_future()
        self.address = await self._listener.start(self.address)

    def _made(self, joined: bool) -> grpc.aio.Server:
        calls = MAX_SESSIONS + (MAX_READERS if self._blocks is not None else 0)
        options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(joined))]
        server: grpc.aio.Server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
        handlers = {"Session": grpc.stream_stream_rpc_method_handler(self._serve)}  # type: ignore[no-untyped-call]
        if self._blocks is not None:
            handlers["Blocks"] = self._blocks
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)  # type: ignore[no-untyped-call]
        server.add_generic_rpc_handlers((generic,))
        return server

    def ready(self, hello: Hello) -> None:
        """The model is loaded: greet the waiting gateway, and every later one."""
        assert self._hello is not None, "start() first"
        if not self._hello.done():
            self._hello.set_result(hello)

    async def refuse(self, reason: str, timeout_s: float = 2.0) -> None:
        """There will be no model: the gateway that waits for a greeting hears why, and so does one that comes now."""
        assert self._hello is not None, "start() first"
        if not self._hello.done():
            self._hello.set_exception(_NoModelError(reason[:MAX_REASON]))
            self._hello.exception()  # perhaps nobody waits for it
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), timeout_s)

    def renew(self, hello: Hello) -> None:
        """What every later gateway is told instead."""
        self._hello = asyncio.get_running_loop().create_future()
        self._hello.set_result(hello)

    def publish(self, outputs: StepOutputs) -> None:
        """Send one step's news; merged with what is unsent while the reader is slow. From any thread, never blocks."""
        self._outbox.put(outputs)

    def purged(self, receipt: Purged | AdapterAnswer) -> None:
        """Answer a purge, or an adapter's coming or going. From any thread."""
        self._outbox.put_receipt(receipt)

    async def end_session(self, timeout_s: float = 5.0) -> None:
        """Send what is unsent and end the stream with OK (after a drain)."""
        session = self._session
        if session is not None:
            session.finish.set()
            self._pending.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), timeout_s)

    async def stop(self) -> None:
        """Close the port and every stream."""
        await self._listener.stop()
        if self._hello is not None:
            self._hello.cancel()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._pending.set)

    def _authorised(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> bool:
        if self._secret is None:
            return True
        metadata = context.invocation_metadata() or ()
        offered = [value for key, value in metadata if key == SECRET_KEY]
        value = offered[0] if len(offered) == 1 else ""
        return hmac.compare_digest(value if isinstance(value, bytes) else value.encode(), self._secret)

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if not self._authorised(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this worker takes only its gateway: wrong secret")
        session = _Session()
        async with self._takeover:
            if self._session is not None:
                self._session.replaced.set()
                await self._session.ended.wait()
            self._session = session
        talk = asyncio.create_task(self._talk(session, context))
        replaced = asyncio.create_task(session.replaced.wait())
        try:
            await asyncio.wait({talk, replaced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(talk, replaced)
            for request_id in self._outbox.close():
                self._on_message(Cancel(id=request_id))
            self._session = None
            session.ended.set()
        if not talk.cancelled():
            talk.result()
        elif session.replaced.is_set():
            await context.abort(grpc.StatusCode.ABORTED, "another gateway took this worker over")

    async def _talk(self, session: _Session, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.send_initial_metadata(((OPEN_KEY, "1"),))
        await self._greet(context)
        self._outbox.open()
        reader = asyncio.create_task(self._read(context))
        writer = asyncio.create_task(self._write(session, context))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(reader, writer)
        try:
            for task in done:
                task.result()
        except msgspec.DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a message of this protocol: {error}")

    async def _greet(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        assert self._hello is not None
        try:
            hello = await asyncio.shield(self._hello)
        except _NoModelError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise  # not reached: abort does
        deadline = asyncio.get_running_loop().time() + ORPHAN_WAIT_S
        while self._outbox.orphans:
            if asyncio.get_running_loop().time() > deadline:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, "the requests of the last session are still not cancelled"
                )
            await asyncio.sleep(0.01)
        await context.write(encode(hello))

    async def _read(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            for message in decode_down(data):
                if isinstance(message, Generate) and not self._outbox.register(message.id, message.n):
                    continue  # an id that is running: its outputs could not be told apart
                self._on_message(message)

    async def _write(self, session: _Session, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            finishing = session.finish.is_set()  # asked before take(): what was put until then goes out
            for message in self._outbox.take():
                for frame in frames(message, MAX_FRAME):
                    await context.write(frame)
            if finishing:
                return


class _NoModelError(Exception):
    """Why a worker will not be ready."""


class _Session:
    def __init__(self) -> None:
        self.replaced = asyncio.Event()
        self.finish = asyncio.Event()
        self.ended = asyncio.Event()


def _require_private_socket(address: str) -> None:
    if not address.startswith("unix:"):
        raise ValueError(f"a worker on {address} would be open to anybody: give it a secret, or a unix:/path address")
    folder = Path(address.removeprefix("unix:")).parent
    mode = folder.stat().st_mode
    if stat.S_IMODE(mode) & 0o077 or folder.stat().st_uid != os.geteuid():
        raise ValueError(f"{folder} can be entered by others: chmod 0700 it, or give the worker a secret")
