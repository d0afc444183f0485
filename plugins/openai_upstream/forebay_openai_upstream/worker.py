"""The worker protocol over one server: what a worker process with an engine is elsewhere, without the process.

Rules
- One task per request. It reports the end of every choice exactly once, also when it is cancelled.
- There are no blocks and no steps. The figures say "room for all", so that ``max_running`` alone gates; a beat a second
  counts as a step, since a slow server is watched request by request (``first_token_s``, ``between_chunks_s``).
- Ready when the server answers; asked again and again until then. Later failures are for the gateway's breaker.
- Purges cannot be passed on. The answer says so where anything of what is purged was sent there; with ``cache_salt`` a
  new epoch makes it unreachable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from forebay_openai_upstream.call import Call
from forebay_openai_upstream.config import UpstreamConfig
from forebay_openai_upstream.http import Connections
from workers.protocol import (
    PROTOCOL,
    Cancel,
    Down,
    Drain,
    Generate,
    Hello,
    Purge,
    Purged,
    SequenceOutput,
    StepOutputs,
    WorkerStats,
)
from workers.rpc import WorkerServer

BEAT_S = 1.0
FIRST_PROBE_S = 0.25
MAX_PROBE_S = 5.0
BLOCK_SIZE = 16
PUBLIC = b"public"
"""Stands for all public prefixes among what was sent."""
REMEMBERED = 200_000
"""Scopes and labels of requests that went there; with more, anything may have gone there."""

Log = Callable[..., None]


class Upstream:
    """One worker. Belongs to the event loop."""

    def __init__(self, address: str, *, secret: str, name: str, model: str, config: UpstreamConfig, key: str | None,
                 log: Log) -> None:  # fmt: skip
        """``log(event, **fields)`` takes what the operator should know."""
        self._server = WorkerServer(address, self._deliver, secret=secret)
        self._connections = Connections(config, key)
        self._name = name
        self._model = model
        self._config = config
        self._log = log
        self._calls: dict[str, tuple[Call, asyncio.Task[None]]] = {}
        self._sent: set[bytes] = set()
        self._step = 0
        self._draining = False
        self._background: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Listen; greet when the server answers. Raises OSError."""
        await self._server.start()
        self._background = [asyncio.create_task(self._greet()), asyncio.create_task(self._beat())]

    async def stop(self) -> None:
        """End every request, the port and the connections."""
        tasks = [*self._background, *(task for _, task in self._calls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop()
        await self._connections.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _deliver(self, message: Down) -> None:
        if isinstance(message, Generate):
            self._begin(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, Purge):
            self._server.purged(Purged(message.id, 0, unreachable=self._has(message)))
        elif isinstance(message, Drain):
            self._draining = True
            self._end_drained()

    def _begin(self, message: Generate) -> None:
        if self._draining:
            ends = [SequenceOutput(message.id, i, finish="error", error="draining") for i in range(message.n)]
            self._publish(ends)
            return
        self._remember(message)
        call = Call(message, self._config, self._connections, self._publish, self._model)
        task = asyncio.create_task(self._run(message.id, call))
        self._calls[message.id] = call, task
        task.add_done_callback(lambda _: self._ended(message.id, call))

    def _remember(self, message: Generate) -> None:
        if len(self._sent) < REMEMBERED:
            self._sent.update((message.scope, *message.labels))
            if message.public_prefix_tokens:
                self._sent.add(PUBLIC)

    def _has(self, message: Purge) -> bool:
        """Whether the server may hold something of what is purged."""
        named = {*message.scopes, *message.labels, *([PUBLIC] if message.keys else ())}
        return len(self._sent) >= REMEMBERED or not named.isdisjoint(self._sent)

    async def _run(self, request_id: str, call: Call) -> None:
        failure = await call.run()
        if failure is not None:
            self._log("upstream_request_failed", job=request_id, why=failure)

    def _ended(self, request_id: str, call: Call) -> None:
        """Also for a task that was cancelled before it began."""
        call.abandon()
        del self._calls[request_id]
        self._end_drained()

    def _cancel(self, message: Cancel) -> None:
        call, task = self._calls.get(message.id, (None, None))
        if call is not None and task is not None and (message.index is None or call.drop(message.index)):
            task.cancel()

    def _publish(self, outputs: list[SequenceOutput]) -> None:
        self._step += 1
        self._server.publish(StepOutputs(self._step, outputs, self._stats()))

    def _stats(self) -> WorkerStats:
        return WorkerStats(free_blocks=self._blocks, running=len(self._calls))

    @property
    def _blocks(self) -> int:
        """Room for as much as may run, twice over: never what gates."""
        return 2 * self._config.max_running * -(-self._config.max_context // BLOCK_SIZE)

    def _end_drained(self) -> None:
        if self._draining and not self._calls:
            self._background.append(asyncio.create_task(self._server.end_session()))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._publish([])

    async def _greet(self) -> None:
        await self._reachable()
        self._server.ready(
            Hello(
                protocol=PROTOCOL,
                worker=self._name,
                model=self._model,
                model_revision=f"upstream:{self._config.model or self._model}",
                tokenizer_sha256="",
                block_size=BLOCK_SIZE,
                blocks=self._blocks,
                max_running=self._config.max_running,
                max_context=self._config.max_context,
                device="upstream",
                dtype="",
                upstream=True,
                endpoints=list(self._config.endpoints),
            )
        )

    async def _reachable(self) -> None:
        """Return when the server answers. What is wrong with it is logged, each kind once."""
        wait_s, said = FIRST_PROBE_S, ""
        while self._config.probe:
            try:
                status = await self._connections.answers()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = f"cannot be reached ({type(error).__name__})"
            else:
                # A server without the list is there all the same; one that does not let us in, or is failing, is not.
                if status < 400 or status in (404, 405):
                    return
                why = "refuses the key: see api_key_env" if status in (401, 403) else f"answers {status} to GET /models"
            if why != said:
                self._log("upstream_not_ready", why=why)
                said = why
            await asyncio.sleep(wait_s)
            wait_s = min(MAX_PROBE_S, wait_s * 2)
