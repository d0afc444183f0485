"""Workers on other machines: gRPC, one bidirectional stream, with TLS where it is set up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec

from workers.protocol import Up, decode_up
from workers.rpc.listening import Listener
from workers.rpc.tls import TlsFiles, shake_hands
from workers.rpc.transport import Desk, in_parts
from workers.rpc.wire import (
    CLIENT_OPTIONS,
    METHOD,
    OPEN_KEY,
    SECRET_KEY,
    SERVER_OPTIONS,
    SERVICE,
    SessionError,
    cancel_all,
    wrong_secret,
)

if TYPE_CHECKING:
    from workers.rpc.reception import Reception
    from workers.rpc.unsent import Unsent

MAX_SESSIONS = 16
"""Of gateways, with those that are on their way out."""
MAX_READERS = 1024
"""Other workers' calls at once."""


class NetworkLine:
    """The gateway's end. A ``Line``."""

    def __init__(self, address: str, secret: str | None, tls: TlsFiles | None, unsent: Unsent) -> None:
        self._address = address
        self._secret = secret
        self._tls = tls
        self._unsent = unsent
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def up(self) -> bool:
        """Its writer runs."""
        return self._writer is not None and not self._writer.done()

    async def open(self) -> None:
        """Channel, then call. Raises SessionError."""
        metadata = ((SECRET_KEY, self._secret),) if self._secret is not None else ()
        try:
            self._channel = await self._opened()
            await self._channel.channel_ready()
            self._call = self._channel.stream_stream(METHOD)(metadata=metadata)
            answer = await self._call.initial_metadata()
            if answer is None or OPEN_KEY not in answer:
                raise SessionError(*await _status(self._call))
        except grpc.aio.AioRpcError as error:
            raise SessionError(error.code().name.lower(), error.details() or "") from error
        self._writer = asyncio.create_task(self._write())

    async def _opened(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        await shake_hands(self._address, self._tls)
        credentials, options = await asyncio.to_thread(self._tls.for_client)
        return grpc.aio.secure_channel(self._address, credentials, options=[*CLIENT_OPTIONS, *options])

    async def listen(self, on_message: Callable[[Up], None]) -> None:
        """Read, decode, hand on."""
        while True:
            try:
                data = await self._call.read()
            except grpc.aio.AioRpcError as error:
                raise SessionError(error.code().name.lower(), error.details() or "") from error
            except asyncio.CancelledError:
                if self._closed:
                    return
                raise
            if data is grpc.aio.EOF:
                code, detail = await _status(self._call)
                if code != "ok" and not self._closed:
                    raise SessionError(code, detail)
                return
            try:
                message = decode_up(data)
            except msgspec.DecodeError as error:
                raise SessionError("protocol", f"not a message of this protocol: {error}") from error
            for part in in_parts(message):
                on_message(part)
                if part is not message:
                    await asyncio.sleep(0)

    def wake(self) -> None:
        """Have the writer look."""
        self._idle.clear()
        self._wake.set()

    def flush(self) -> None:
        """Its writer is a task."""

    async def say_the_rest(self, timeout_s: float) -> None:
        """Nobody reads where the writer has ended, or does not come to an end soon."""
        assert self._writer is not None
        self.wake()
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait({idle, self._writer}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(idle)

    async def close(self) -> None:
        """Cancel the call."""
        self._closed = True
        if self._writer is not None:
            await cancel_all(self._writer)
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while data := self._unsent.take():
                try:
                    await self._call.write(data)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader reports why
            self._idle.set()


class NetworkPort:
    """The worker's end. A ``Port``."""

    blocks_address = ""

    def __init__(self, reception: Reception, tls: TlsFiles | None, blocks: grpc.RpcMethodHandler | None) -> None:
        self._reception = reception
        self._blocks = blocks
        self._listener = Listener(self._made, tls)

    async def start(self, address: str) -> str:
        """Listen. Raises OSError."""
        return await self._listener.start(address)

    async def stop(self) -> None:
        """Close the port and every stream."""
        await self._listener.stop()

    def _made(self, joined: bool) -> grpc.aio.Server:
        session = grpc.stream_stream_rpc_method_handler(self._serve)  # type: ignore[no-untyped-call]
        if self._blocks is None:
            return server({"Session": session}, MAX_SESSIONS, joined)
        return server({"Session": session, "Blocks": self._blocks}, MAX_SESSIONS + MAX_READERS, joined)

    async def _serve(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        offered = [value for key, value in context.invocation_metadata() or () if key == SECRET_KEY]
        value = offered[0] if len(offered) == 1 else ""
        try:
            if not self._reception.admits(value if isinstance(value, bytes) else value.encode()):
                raise wrong_secret()
            await self._reception.serve(_NetworkCaller(context))
        except SessionError as error:
            await context.abort(grpc.StatusCode[error.code.upper()], error.detail)


class _NetworkCaller:
    """A ``Caller``: one call."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    async def let_in(self) -> None:
        await self._context.send_initial_metadata(((OPEN_KEY, "1"),))

    async def greet(self, hello: bytes) -> None:
        await self._context.write(hello)

    async def talk(self, desk: Desk) -> None:
        reader = asyncio.create_task(self._read(desk))
        writer = asyncio.create_task(self._write(desk))
        try:
            done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(reader, writer)
        for task in done:
            task.result()

    def news(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            return

    async def _read(self, desk: Desk) -> None:
        while (data := await self._context.read()) is not grpc.aio.EOF:
            desk.heard(data)

    async def _write(self, desk: Desk) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            finishing = desk.finishing  # asked before take(): what was put until then goes out
            for frame in desk.take():
                await self._context.write(frame)
            if finishing:
                return


def server(handlers: dict[str, grpc.RpcMethodHandler], calls: int, joined: bool = False) -> grpc.aio.Server:
    """A gRPC server of our service, without a port. ``joined``: others of this process may join its port."""
    options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(joined))]
    made: grpc.aio.Server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls)
    generic = grpc.method_handlers_generic_handler(SERVICE, handlers)  # type: ignore[no-untyped-call]
    made.add_generic_rpc_handlers((generic,))
    return made


async def _status(call: Any) -> tuple[str, str]:
    code: grpc.StatusCode = await call.code()
    return code.name.lower(), await call.details() or ""
