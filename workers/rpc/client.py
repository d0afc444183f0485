"""The gateway's end of the stream. The rules are in ``workers.rpc``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.protocol import Down, Keep, Up
from workers.rpc.schemes import transport_of
from workers.rpc.tls import TlsFiles
from workers.rpc.unsent import Unsent
from workers.rpc.wire import LAST_WORDS_S, MAX_QUEUED, PATIENCE_S, LinkError, SessionError


class WorkerClient:
    """The gateway's end: ``connect``, then ``listen`` in one task, ``send`` from any.

    One session per object; it belongs to the event loop.
    """

    def __init__(
        self, address: str, secret: str | None = None, *, tls: TlsFiles | None = None, max_queued: int = MAX_QUEUED
    ) -> None:
        self.address = address
        self._unsent = Unsent(max_queued)
        self._line = transport_of(address).line(address, secret, tls, self._unsent)
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False

    async def connect(self, timeout_s: float = 30.0) -> None:
        """Open the session; returns when the worker has let us in (it may still load its model).

        Waits for a worker that does not listen yet. Raises SessionError.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._line.open()
        except TimeoutError:
            await self.close()
            raise SessionError("unavailable", f"nobody answers at {self.address} within {timeout_s:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def listen(self, on_message: Callable[[Up], None]) -> None:
        """Hand on the worker's messages as they come. Returns when it ends the session in good order, or on ``close``.

        ``on_message`` is called on the event loop: while it runs the worker's news wait in the worker, merged. Long
        reports come in parts, and others have their turns between. What it raises ends the session and is raised here.
        Raises SessionError when the session breaks.
        """
        await self._line.listen(on_message)

    def send(self, message: Down) -> None:
        """Queue one message; never blocks. Raises LinkError, and then it was not queued.

        ``Keep``, which nobody waits for, goes with the next message, or after ``PATIENCE_S``: a write costs a tenth of
        a request, and wakes the worker.
        The line is bounded for requests; what ends or steers them (cancel, purge …) has room beyond that.
        """
        if self._closed or not self._line.up:
            raise LinkError("the session has ended")
        self._unsent.add(message)
        if not isinstance(message, Keep):
            self._lose_patience()
            self._line.wake()
        elif self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._wake)

    def flush(self) -> None:
        """Nothing follows for now: what was sent goes out at once, where it would wait for the loop's next turn."""
        self._line.flush()

    async def close(self) -> None:
        """Send what is unsent, if the worker takes it, and end the session; the worker cancels every request of it.

        Idempotent.
        """
        self._closed = True
        self._lose_patience()
        try:
            if self._line.up:
                await self._line.say_the_rest(LAST_WORDS_S)
        finally:
            await self._line.close()

    def _wake(self) -> None:
        self._patience = None
        if self._line.up:
            self._line.wake()

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
