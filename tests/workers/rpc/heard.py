"""A client's messages one by one, for tests that ask for the next."""

from __future__ import annotations

import asyncio

from workers.protocol import Up
from workers.rpc import WorkerClient


class Heard:
    """Listens from now on, in a task of its own; iterates over what came, then raises what ended it."""

    def __init__(self, client: WorkerClient) -> None:
        self._queue: asyncio.Queue[Up] = asyncio.Queue()
        self._listening = asyncio.create_task(client.listen(self._queue.put_nowait))

    def __aiter__(self) -> Heard:
        return self

    async def __anext__(self) -> Up:
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
