"""The reader's desk: a request waits here for the blocks of its prompt, and goes to the engine with or without them.

Rules
- Every request that comes in goes on to the engine exactly once, whatever happens: when its blocks are there, when they
  do not come, and before anything that concerns it (a cancel, a purge of its blocks, a drain).
- Each part is checked against keys that are made here from the request. The first one that does not fit ends the
  transfer; what came before it is right.
- At most one part per request is between stream and engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from workers.engine.arrivals import Arrived, HandedOver
from workers.engine.block_hash import BlockKey, KeyChain
from workers.engine.leases import concerns
from workers.engine.record import TransferRecord
from workers.log import get
from workers.protocol import Generate, Purge
from workers.transfer.connector import Connector, Part, TransferError
from workers.transfer.lend import settle

log = get("transfer")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request here."""

    generate: Generate
    task: asyncio.Task[None]
    """Fetches for it."""
    start_ns: int = field(default_factory=time.time_ns)
    ticks: int = field(default_factory=time.perf_counter_ns)

    def now_ns(self) -> int:
        """Unix time, by a clock that is not set meanwhile."""
        return self.start_ns + time.perf_counter_ns() - self.ticks


class Fetcher:
    """Of one decode worker."""

    def __init__(
        self,
        connector: Connector,
        submit: Callable[[Arrived | HandedOver], None],
        *,
        layout: str,
        revision: str,
        block_size: int,
        block_bytes: int,
        timeout_s: float,
        on_end: Callable[[TransferRecord], None] = lambda record: None,
    ) -> None:
        """``on_end``: once for each request, before it goes to the engine."""
        self._connector = connector
        self._submit = submit
        self._layout = layout
        self._revision = revision
        self._size = block_size
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, generate: Generate) -> None:
        """Fetch what the request names, then run it."""
        if generate.id in self._waiting:
            return  # as the engine does with an id that runs
        task = self._loop.create_task(self._fetch(generate), name="transfer")
        self._waiting[generate.id] = _Waiting(generate, task)

    def let_go(self, request_id: str) -> None:
        """Run it with what is there."""
        if request_id in self._waiting:
            waiting = self._waiting[request_id]
            self._run(waiting.generate, 0, "stopped")
            waiting.task.cancel()

    def purge(self, purge: Purge) -> None:
        """Before a purge: nothing that it concerns arrives after it."""
        for generate in [waiting.generate for waiting in self._waiting.values()]:
            if concerns(purge, generate, self._keys(generate) if purge.keys else ()):
                self.let_go(generate.id)

    def let_all_go(self) -> None:
        """Run everything with what is there."""
        for request_id in list(self._waiting):
            self.let_go(request_id)

    async def close(self) -> None:
        """End every transfer."""
        tasks = [waiting.task for waiting in self._waiting.values()]
        self.let_all_go()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, generate: Generate) -> None:
        computed, result = 0, "ok"
        try:
            async with asyncio.timeout(self._timeout_s):
                computed = await self._pulled(generate)
        except TimeoutError:
            result = "late"
        except TransferError as error:
            result = error.reason
        except Exception as error:  # a connector is foreign code
            log.error("transfer_broke", exc_info=error)
            result = "broken"
        if result != "ok":
            log.warning("transfer_failed", request=generate.id, why=result, meaning="the prompt is computed here")
        self._run(generate, computed, result)

    def _run(self, generate: Generate, computed: int, result: str) -> None:
        if (waited := self._waiting.pop(generate.id, None)) is None:
            return
        source = "" if generate.source is None else generate.source.address
        try:
            self._on_end(TransferRecord(generate.trace, source, waited.start_ns, waited.now_ns(), result, computed))
        except Exception as error:  # telemetry: no reason to lose a request
            log.error("transfer_record_lost", exc_info=error)
        self._submit(HandedOver(generate, computed))

    async def _pulled(self, generate: Generate) -> int:
        """Have every part placed. Returns how many tokens the source computed. Raises TransferError."""
        assert generate.source is not None
        keys = self._keys(generate)
        public = generate.public_prefix_tokens // self._size
        done = computed = 0
        async with aclosing(self._connector.pull(generate.source, self._layout)) as parts:
            async for part in parts:
                self._check(part, keys[done : done + len(part.keys)])
                placed: asyncio.Future[bool] = self._loop.create_future()

                def reply(more: bool, placed: asyncio.Future[bool] = placed) -> None:
                    settle(self._loop, placed, more)

                own = [BlockKey(key) for key in part.keys]
                self._submit(Arrived(generate, own, part.data, max(0, public - done), reply))
                if not await placed:
                    raise TransferError("room", "this cache has no room for all of it")
                done += len(own)
                computed = part.computed
        if not done:
            raise TransferError("broken", "the stream had no part")
        return max(0, min(computed, done * self._size))

    def _check(self, part: Part, expected: list[BlockKey]) -> None:
        if not part.keys or part.keys != expected:
            raise TransferError("keys", "the blocks are not those of this prompt")
        if len(part.data) != len(part.keys) * self._block_bytes:
            raise TransferError("broken", "a part is not as long as its blocks")

    def _keys(self, generate: Generate) -> list[BlockKey]:
        """Of all blocks that a request can hit: at least its last token is always computed."""
        keys: list[BlockKey] = []
        chain = KeyChain(
            generate.scope,
            self._revision,
            generate.adapter,
            self._size,
            public_tokens=generate.public_prefix_tokens,
        )
        chain.extend(keys, generate.tokens, (len(generate.tokens) - 1) // self._size)
        return keys
