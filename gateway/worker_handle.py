"""One session with one worker, as the gateway sees it: state, live in-flight figures, and the way to send to it.

Rules
- A handle lives for one start of one worker: ``loading → ready → (draining) → down``, never back. A restarted worker
  gets a new handle with the same name and the next ``incarnation``.
- Lives on the event loop; nothing here blocks or awaits except ``purge``.
- In flight from ``send(Generate)`` until the worker reported the end of every choice (also after a cancel: the worker's
  slot is busy until it says so) or was lost.
- Figures of ``view`` are the worker's last report plus what was sent since. Stale ones are flagged (``stale_s``).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from msgspec.structs import replace as with_fields

from gateway.breaker import Breaker
from gateway.worker_adapters import WorkerAdapters
from policies.types import PrefixKey, WorkerView, kv_blocks
from workers.protocol import Down, Drain, Generate, Hello, Purge, Purged, SequenceOutput, StepOutputs, WorkerStats
from workers.rpc import LinkError


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


class LossKind(StrEnum):
    """Why a worker is gone."""

    EXITED = "exited"
    """The process ended by itself, with an exit code."""
    SIGNALLED = "signalled"
    """The process was ended by a signal that this gateway did not send (crash, out of memory, an operator)."""
    DISCONNECTED = "disconnected"
    """The stream broke; the process may be alive (static workers)."""
    STALLED = "stalled"
    """Running work and no step for ``step_stall_s``; this gateway killed it."""
    PROTOCOL = "protocol"
    """It said something that this gateway does not understand, or is not the worker it should be."""
    REPLACED = "replaced"
    """Another gateway took the session over."""
    REFUSED = "refused"
    """It does not take this gateway's secret."""
    START_FAILED = "start_failed"
    """It did not come up."""
    STOPPED = "stopped"
    """This gateway stopped it on purpose."""


#: Losses that a request in flight may have caused. A dispatcher that counts them per request finds the poisonous one.
SUSPICIOUS = frozenset({LossKind.EXITED, LossKind.SIGNALLED, LossKind.STALLED})


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """What is known about the end of a worker."""

    kind: LossKind
    detail: str = ""
    """For the operator's log; never for a caller."""
    exit_code: int | None = None
    signal: int | None = None
    inflight: tuple[str, ...] = ()
    """Requests it had, in the order in which they were sent."""
    computing: frozenset[str] = frozenset()
    """Those of ``inflight`` of which it had reported anything: they were in its batch."""

    @property
    def suspicious(self) -> bool:
        """True when a request in flight may have caused it."""
        return self.kind in SUSPICIOUS


class WorkerGoneError(Exception):
    """The worker is not there (any more), or its line is full: nothing was sent. Route the request elsewhere."""


class Link(Protocol):
    """What a handle sends through; ``workers.rpc.WorkerClient`` is one."""

    def send(self, message: Down) -> None:
        """Queue a message without blocking. Raises ``workers.rpc.LinkError`` (nothing was sent)."""
        ...

    def flush(self) -> None:
        """Send what is queued now, where it would wait for the loop's next turn. Never raises."""
        ...


#: Codes of ``SequenceOutput.error`` that are the worker's fault, not the caller's.
WORKER_FAULTS = frozenset({"internal", "overloaded", "unavailable", "upstream_failed", "upstream_timeout"})


@dataclass(slots=True)
class _InFlight:
    prompt: int
    max_tokens: int
    left: dict[int, int]
    """Output tokens still owed per open choice."""
    prompt_left: int
    promised: int = 0
    """Blocks it will take that are not yet in the worker's own figures: all of its prompt's, until the worker first
    reports of it (the engine takes them at once on admission), then none."""
    seen: bool = False


class WorkerHandle:
    """One worker of a pool. Made by ``gateway.pool.Pool``; read and used by the dispatcher."""

    def __init__(
        self,
        name: str,
        *,
        model: str,
        pool: str,
        labels: Mapping[str, str],
        classes: frozenset[str] = frozenset(),
        incarnation: int,
        clock: Callable[[], float],
        breaker: Breaker | None = None,
        stale_after_s: float = 2.0,
    ) -> None:
        self.name = name
        """``<model>/<pool>-<index>``: the ``worker`` label of metrics and ``forebay.worker`` of spans."""
        self.model = model
        self.pool = pool
        self.labels = labels
        self.classes = classes
        """Service classes that the pool is kept for; empty: all."""
        self.incarnation = incarnation
        """1 for a slot's first start."""
        self.state = WorkerState.LOADING
        self.hello: Hello | None = None
        self.stats = WorkerStats()
        self.loss: WorkerLoss | None = None
        self.breaker = breaker or Breaker()
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._link: Link | None = None
        self._requests: dict[str, _InFlight] = {}
        self._sequences = 0
        self._owed = 0
        self._promised = 0
        self._block_size = 16
        self._reported_at: float | None = None
        self._step = 0
        self._progress_at = clock()
        self._hot: frozenset[PrefixKey] = frozenset()
        self._hot_source: list[bytes] = []
        self._purges: dict[str, tuple[asyncio.Future[Purged], Callable[[Purged], None] | None]] = {}
        self.adapters = WorkerAdapters(self.send)

    # -- for the dispatcher ---------------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Sequences (choices) sent and not yet ended."""
        return self._sequences

    @property
    def inflight_tokens(self) -> int:
        """Tokens still owed to them: prompt not yet computed + output not yet produced."""
        return self._owed

    @property
    def inflight_ids(self) -> tuple[str, ...]:
        """Requests in flight, in the order in which they were sent."""
        return tuple(self._requests)

    @property
    def step(self) -> int:
        """The last engine step it reported."""
        return self._step

    def available(self, now: float) -> bool:
        """May it be sent a request now? Ready, and not set aside for its faults (then one probe per interval)."""
        return self.state is WorkerState.READY and self.breaker.allows(now)

    def stale_s(self, now: float) -> float:
        """Age of the last report in seconds; 0 before Hello."""
        return 0.0 if self._reported_at is None else max(0.0, now - self._reported_at)

    def is_stale(self, now: float) -> bool:
        """Are the block figures too old to gate dispatch (> 2 s)? Then only the in-flight count does."""
        return self.stale_s(now) > self._stale_after_s

    def view(self, now: float) -> WorkerView:
        """For routing, in O(1). ``inflight`` counts choices; of ``free_blocks`` what was sent since is taken away."""
        hello = self.hello
        return WorkerView(
            name=self.name,
            model=self.model,
            pool=self.pool,
            labels=self.labels,
            classes=self.classes,
            inflight=self._sequences,
            inflight_tokens=self._owed,
            waiting=self.stats.waiting,
            max_running=self.stats.max_running or (hello.max_running if hello else 1),
            free_blocks=max(0, self.stats.free_blocks + self.stats.cached_blocks - self._promised),
            total_blocks=hello.blocks if hello else 0,
            block_size=self._block_size,
            keeps=tuple(hello.keeps) if hello else (),
            hot_prefixes=self._hot,
            adapters=self.adapters.held,
            stale_s=self.stale_s(now),
        )

    def send(self, message: Down) -> None:
        """Queue a message to the worker; never blocks. Raises WorkerGoneError, and then nothing was sent or counted.

        ``Generate`` is in flight from here on; it is refused unless the worker is ready, or when its id already is.
        """
        link = self._link
        if link is None or self.state is WorkerState.DOWN:
            raise WorkerGoneError(f"worker {self.name} is {self.state}")
        if isinstance(message, Generate):
            if self.state is not WorkerState.READY:
                raise WorkerGoneError(f"worker {self.name} is {self.state}")
            if message.id in self._requests:
                raise ValueError(f"request {message.id} is already in flight at worker {self.name}")
        try:
            link.send(message)
        except LinkError as error:
            raise WorkerGoneError(f"worker {self.name}: {error}") from error
        if isinstance(message, Generate):
            self._track(message)

    def flush(self) -> None:
        """Nothing more is sent for now: have what was sent go out at once, and not in the loop's next turn."""
        if self._link is not None:
            self._link.flush()

    def drain(self) -> None:
        """Send it no new requests and have it end when what it has is done. Raises WorkerGoneError.

        A worker that a launcher of ours started is then started afresh; a static one leaves the pool.
        """
        self.send(Drain())
        self.draining()

    async def purge(
        self, what: Purge, timeout_s: float = 10.0, on_complete: Callable[[Purged], None] | None = None
    ) -> Purged:
        """Have the cached blocks zeroed that ``what`` names; its id is made here. Raises WorkerGoneError, TimeoutError.

        Returns the worker's first receipt. Where that has ``pending`` blocks (still in use), ``on_complete`` is called
        once with the last receipt, unless the worker is lost before (then its cache is gone anyway).
        """
        request_id = secrets.token_hex(8)
        future: asyncio.Future[Purged] = asyncio.get_running_loop().create_future()
        self._purges[request_id] = (future, on_complete)
        try:
            self.send(with_fields(what, id=request_id))
            async with asyncio.timeout(timeout_s):
                receipt = await future
        except BaseException:
            self._purges.pop(request_id, None)
            raise
        return receipt

    # -- for the pool ---------------------------------------------------------------------------------------------

    def opened(self, link: Link, hello: Hello) -> None:
        """The worker said Hello."""
        now = self._clock()
        self._link = link
        self.hello = hello
        self.adapters.opened(hello.adapters)
        self._block_size = hello.block_size
        self.stats = WorkerStats(free_blocks=hello.blocks)
        self._reported_at = self._progress_at = now
        self.state = WorkerState.READY

    def received(self, outputs: StepOutputs) -> None:
        """Account one report."""
        now = self._clock()
        self._reported_at = now
        if outputs.step > self._step:
            self._step = outputs.step
            self._progress_at = now
        self.stats = outputs.stats
        if outputs.stats.hot_prefixes != self._hot_source:
            self._hot_source = outputs.stats.hot_prefixes
            self._hot = frozenset(map(PrefixKey, outputs.stats.hot_prefixes))
        for output in outputs.outputs:
            self._account(output, now)

    def purged(self, receipt: Purged) -> None:
        """A purge was answered. An answer nobody waits for any more is ignored."""
        future, on_complete = self._purges.get(receipt.id, (None, None))
        if future is None:
            return
        if receipt.pending == 0 or on_complete is None:
            del self._purges[receipt.id]
        if not future.done():
            future.set_result(receipt)
        elif receipt.pending == 0 and on_complete is not None:
            on_complete(receipt)

    def draining(self) -> None:
        """Send it no new requests."""
        if self.state in (WorkerState.LOADING, WorkerState.READY):
            self.state = WorkerState.DRAINING

    def stalled_s(self) -> float:
        """Seconds of running work without a step; 0 when nothing is in flight."""
        return self._clock() - self._progress_at if self._requests else 0.0

    def closed(self, loss: WorkerLoss) -> WorkerLoss:
        """The worker is gone. Returns ``loss`` with what it had in flight; the handle's figures go to zero."""
        self.state = WorkerState.DOWN
        self._link = None
        self.loss = replace(
            loss,
            inflight=tuple(self._requests),
            computing=frozenset(request_id for request_id, request in self._requests.items() if request.seen),
        )
        self._requests.clear()
        self.adapters.closed(WorkerGoneError(f"worker {self.name} is gone"))
        self._sequences = self._owed = self._promised = 0
        for future, _ in self._purges.values():
            if not future.done():
                future.set_exception(WorkerGoneError(f"worker {self.name} was lost: {loss.kind}"))
        self._purges.clear()
        return self.loss

    # -- inside ---------------------------------------------------------------------------------------------------

    def _track(self, message: Generate) -> None:
        now = self._clock()
        if not self._requests:
            self._progress_at = now  # idle until now: the stall clock starts with this request
        request = _InFlight(
            prompt=len(message.tokens),
            max_tokens=message.max_tokens,
            left=dict.fromkeys(range(message.n), message.max_tokens),
            prompt_left=len(message.tokens),
            promised=kv_blocks(len(message.tokens) + 1, self._block_size, self.hello.keeps if self.hello else ()),
        )
        self._requests[message.id] = request
        self._sequences += message.n
        self._owed += request.prompt + message.max_tokens * message.n
        self._promised += request.promised
        self.breaker.sent(message.id, now)

    def _account(self, output: SequenceOutput, now: float) -> None:
        request = self._requests.get(output.id)
        if request is None or output.index not in request.left:
            return
        if not request.seen:
            request.seen = True
            self._promised -= request.promised
        started = bool(output.output_tokens) or output.text is not None
        if started:
            self.breaker.success()
        if request.prompt_left:
            done = request.prompt if started else output.prompt_computed + output.prompt_cached
            left = min(request.prompt_left, max(0, request.prompt - done))
            self._owed += left - request.prompt_left
            request.prompt_left = left
        if output.finish is None:
            left = request.max_tokens - output.output_tokens if output.output_tokens < request.max_tokens else 0
            self._owed += left - request.left[output.index]
            request.left[output.index] = left
            return
        self._owed -= request.left.pop(output.index)
        self._sequences -= 1
        if output.finish == "error" and output.error in WORKER_FAULTS:
            self.breaker.fault(output.id, now)
        else:
            self.breaker.neutral(output.id)
            if output.error == "draining":
                self.draining()
        if not request.left:
            self._owed -= request.prompt_left
            del self._requests[output.id]
