"""The adapters of one worker, as its handle keeps them: which it may be sent requests for, asking for more or fewer.

Rules
- Belongs to the event loop. An adapter counts from the worker's word that it is loaded until it is asked to drop it.
- Every question is answered once, or fails with the worker. What was loaded after its asker had gone is dropped again.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable

from workers.protocol import AdapterAnswer, AdapterInfo, Down, DropAdapter, LoadAdapter


class WorkerAdapters:
    """One session's."""

    def __init__(self, send: Callable[[Down], None]) -> None:
        """``send`` raises WorkerGoneError."""
        self._send = send
        self.held: frozenset[str] = frozenset()
        """Digests of those that it may be sent requests for."""
        self._waiting: dict[str, asyncio.Future[AdapterAnswer]] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self.held

    def opened(self, adapters: Iterable[AdapterInfo]) -> None:
        """What it has at its hello."""
        self.held = frozenset(adapter.digest for adapter in adapters)

    async def load(self, name: str, source: str, timeout_s: float) -> AdapterAnswer:
        """Have it load one. Raises WorkerGoneError, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            answer = await self._asked(LoadAdapter(secrets.token_hex(8), name, source))
        if answer.adapter is not None:
            self.held |= {answer.adapter.digest}
        return answer

    async def drop(self, digest: str) -> None:
        """Have it drop one; returns when it is freed, after its last request there. Raises WorkerGoneError."""
        self.held -= {digest}
        await self._asked(DropAdapter(secrets.token_hex(8), digest))

    def answered(self, answer: AdapterAnswer) -> None:
        """One has come, or not, or gone."""
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)
        elif answer.adapter is not None and answer.adapter.digest not in self.held:
            self._send(DropAdapter(secrets.token_hex(8), answer.adapter.digest))

    def closed(self, error: Exception) -> None:
        """The worker is gone."""
        self.held = frozenset()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _asked(self, message: LoadAdapter | DropAdapter) -> AdapterAnswer:
        future: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        try:
            self._send(message)
            return await future
        finally:
            self._waiting.pop(message.id, None)
