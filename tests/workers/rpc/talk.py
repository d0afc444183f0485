"""A worker's end that records what it is told, and the first words with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from workers.protocol import PROTOCOL, Down, Hello, SequenceOutput, StepOutputs, Up, WorkerStats
from workers.rpc import WorkerClient, WorkerServer
from workers.rpc.heard import Heard

SECRET = "correct-horse-battery"
HELLO = Hello(PROTOCOL, "w", "m", "rev", "sha", 16, 64, 8, 4096)


class Worker:
    """A server that records what it is told and says what a test wants."""

    def __init__(self, address: str, secret: str | None) -> None:
        self.heard: list[Down] = []
        self.news = asyncio.Event()
        self.secret = secret
        self.server = WorkerServer(address, self._hear, secret=secret)

    def _hear(self, message: Down) -> None:
        self.heard.append(message)
        self.news.set()

    def client(self, **options: Any) -> WorkerClient:
        """For one session with it."""
        return WorkerClient(self.server.address, self.secret, **options)

    async def until(self, wanted: Callable[[list[Down]], bool]) -> None:
        """Wait for what is heard to be so."""
        async with asyncio.timeout(30):
            while not wanted(self.heard):
                self.news.clear()
                await self.news.wait()

    def end(self, request_id: str) -> None:
        """The engine has let go of a request."""
        output = SequenceOutput(request_id, finish="cancelled")
        self.server.publish(StepOutputs(99, [output], WorkerStats()))


Serve = Callable[..., Awaitable[Worker]]


async def greeted(client: WorkerClient) -> AsyncIterator[Up]:
    """Connect, check Hello, return the iterator for what follows."""
    await client.connect(10)
    messages = Heard(client)
    assert await anext(messages) == HELLO
    return messages


async def heard_of(messages: AsyncIterator[Up], count: int) -> list[int]:
    """The first ``count`` tokens, or all until the end."""
    tokens: list[int] = []
    async with asyncio.timeout(30):
        async for message in messages:
            if isinstance(message, StepOutputs):
                tokens += [token for output in message.outputs for token in output.tokens]
            if len(tokens) >= count:
                return tokens
    return tokens
