"""The gateway's end of the stream. The rules are in ``workers.rpc``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec

from workers.protocol import Down, Generate, Keep, Up, decode_up, encode, joined
from workers.rpc.tls import TlsFiles, shake_hands
from workers.rpc.wire import (
    CLIENT_OPTIONS,
    LAST_WORDS_S,
    MAX_FRAME,
    MAX_JOINED,
    MAX_QUEUED,
    METHOD,
    OPEN_KEY,
    PATIENCE_S,
    SECRET_KEY,
    LinkError,
    SessionError,
    cancel_all,
)


class WorkerClient:
    """The gateway's end: ``connect``, then ``async for message in client`` in one task, ``send`` from any.

    One session per object; it belongs to the event loop.
    """

    def __init__(
        self, address: str, secret: str | None = None, *, tls: TlsFiles | None = None, max_queued: int = MAX_QUEUED
    ) -> None:
        self.address = address
        self._secret = secret
        self._tls = tls
        self._max_queued = max_queued
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Open the session; returns when the worker has let us in (it may still load its model).

        Waits for a worker that does not listen yet. Raises SessionError.
        """
        metadata = ((SECRET_KEY, self._secret),) if self._secret is not None else ()
        try:
            async with asyncio.timeout(timeout_s):
                self._channel = await self._opened()
                await self._channel.channel_ready()
                self._call = self._channel.stream_stream(METHOD)(metadata=metadata)
                answer = await self._call.initial_metadata()
                if answer is None or OPEN_KEY not in answer:
                    raise SessionError(*await _status(self._call))
        except TimeoutError:
            await self.close()
            raise SessionError("unavailable", f"nobody answers at {self.address} within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise SessionError(error.code().name.lower(), error.details() or "") from error
        except BaseException:
            await self.close()
            raise
        self._writer = asyncio.create_task(self._write())

    async def _opened(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS)
        await shake_hands(self.address, self._tls)
        credentials, options = await asyncio.to_thread(self._tls.for_client)
        return grpc.aio.secure_channel(self.address, credentials, options=[*CLIENT_OPTIONS, *options])

    def send(self, message: Down) -> None:
        """Queue one message; never blocks. Raises LinkError, and then it was not queued.

        ``Keep``, which nobody waits for, goes with the next message, or after ``PATIENCE_S``: a write costs a tenth of
        a request, and wakes the worker.
        The line is bounded for requests; what ends or steers them (cancel, purge …) has room beyond that.
        """
        if self._closed or self._writer is None or self._writer.done():
            raise LinkError("the session has ended")
        frame = encode(message)
        if len(frame) + len(joined([])) > MAX_FRAME:
            raise LinkError(f"the message has {len(frame)} bytes, a frame at most {MAX_FRAME}")
        limit = self._max_queued if isinstance(message, Generate) else self._max_queued * 16
        if len(self._queue) >= limit or (isinstance(message, Generate) and self._queued_bytes > MAX_FRAME):
            raise LinkError(f"{len(self._queue)} messages already wait to be sent: the worker does not read")
        self._queue.append(frame)
        self._idle.clear()
        self._queued_bytes += len(frame)
        if not isinstance(message, Keep):
            self._wake.set()
        elif self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._wake.set)

    async def __aiter__(self) -> AsyncIterator[Up]:
        """Messages of the worker until it ends the session in good order. Raises SessionError when it breaks."""
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
            yield message

    async def close(self) -> None:
        """Send what is unsent, if the worker takes it, and end the session; the worker cancels every request of it.

        Idempotent.
        """
        self._closed = True
        await self._say_the_rest()
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
            self._lose_patience()
            while self._queue:
                try:
                    await self._call.write(self._next_frame())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader reports why
            self._idle.set()

    async def _say_the_rest(self) -> None:
        """Nobody reads where the writer has ended, or does not come to an end soon."""
        if self._writer is None or self._writer.done():
            return
        self._lose_patience()
        self._wake.set()
        idle = asyncio.create_task(self._idle.wait())
        await asyncio.wait({idle, self._writer}, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(idle)

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _next_frame(self) -> bytes:
        """What waits, up to ``MAX_JOINED`` bytes: a write costs more than what it carries."""
        queue, messages, size = self._queue, [self._queue.popleft()], 0
        while queue and (size := size + len(messages[-1])) + len(queue[0]) <= MAX_JOINED:
            messages.append(queue.popleft())
        self._queued_bytes -= sum(map(len, messages))
        return joined(messages)


async def _status(call: Any) -> tuple[str, str]:
    code: grpc.StatusCode = await call.code()
    return code.name.lower(), await call.details() or ""
