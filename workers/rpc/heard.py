"""A client's messages one by one, for whoever asks for the next: benchmarks and tests."""

from __future__ import annotations

import asyncio

from workers.protocol import Up
from workers.rpc.client import WorkerClient


class Heard:
    """Iterates over what came; ends with the session, or raises what broke it. Unbounded, so for small talk only."""

    def __init__(self, client: WorkerClient) -> None:
        """Listens from now on, in a task of its own, until the client is closed."""
        self._queue: asyncio.Queue[Up] = asyncio.Queue()
        self._listening = asyncio.create_task(client.listen(self._queue.put_nowait))

    def __aiter__(self) -> Heard:
        return self

    async def __anext__(self) -> Up:
        """Raises SessionError."""
        if self._queue.empty():
            coming = asyncio.create_task(self._queue.get())
            try:
                await asyncio.wait({coming, self._listening}, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    return coming.result()
            finally:
                coming.cancel()
            if self._queue.empty():
                self._listening.result()
                raise StopAsyncIteration
        return self._queue.get_nowait()
