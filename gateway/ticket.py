"""One request between the pipeline, which owns its caller, and the dispatcher, which owns its work.

States: ``queued → running → done``, and back ``running → queued`` while the caller got nothing.

Rules
- Only the dispatcher changes a ticket, on the event loop; the pipeline reads it, and asks by ``Dispatcher.cancel``.
- ``finish`` ends it exactly once: without an error for a request that ran to its end, with the ``ApiError`` otherwise.
  Nothing is pushed, charged or counted after it.
- ``committed`` is set the moment the first delta is handed to the caller; from then on the work is never repeated.
  A caller that collects (no stream) is handed nothing before the end, so its request may be repeated until then.
- What is buffered is bounded by the request's own max_tokens; a slow reader gets what piled up in one batch, and
  ``delivery.py`` ends it when that becomes too much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from gateway.callforms import TAGGED, CallForm
from gateway.errors import ApiError
from gateway.metering import Meter
from gateway.trace import NO_TRACE, RequestTrace, Span
from policies.types import Usage

if TYPE_CHECKING:
    from gateway.choices import ChoiceDelta
    from gateway.intake import Prepared
    from gateway.settings import FallbackReason
    from gateway.worker_handle import WorkerHandle


DELTA_BYTES = 256
"""What an event of a stream takes besides its text, and a scored token besides the event."""


def _nothing() -> None:
    """Nobody wants to know."""


class TicketState(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class CancelledByCaller(ApiError):  # noqa: N818 - it is an outcome, not a fault
    """How a ticket ends that its caller gave up; nobody is there to read it."""

    def __init__(self, reason: str = "client_disconnected") -> None:
        super().__init__(
            499, "The caller went away.", type="cancelled", code=reason, outcome="cancelled", reason=reason
        )


class Ticket:
    """One submitted request."""

    def __init__(self, prepared: Prepared, *, now: float, stream: bool = False, trace: RequestTrace = NO_TRACE) -> None:
        self.prepared = prepared
        self.job: Final = prepared.job
        """The job, as policies see it."""
        self.on_dispatched: Callable[[], None] = _nothing
        """Told, at once, each time it is sent to a worker. Must not raise."""
        self.stream = stream
        self.trace = trace
        self.span: Span | None = None
        """The open span of the station it is at."""
        self.meter = Meter(prepared.job.prompt_tokens, prepared.generate.n)
        self.state = TicketState.QUEUED
        self.error: ApiError | None = None
        self.committed = False
        self.cancelled = False
        """The caller gave up; what still runs is only counted."""
        self.worker: str | None = None
        self.ran_on: list[WorkerHandle] = []
        """Every worker it was sent to, the last one last."""
        self.upstream = False
        """Whether the last of them is an upstream."""
        self.retries = 0
        """Attempts that a worker's fault ended and that were repeated."""
        self.refusals = 0
        """Attempts that a worker handed back."""
        self.turned_away: set[FallbackReason] = set()
        """Why workers would not have it: too busy, or too long for them."""
        self.fingerprint: bytes | None = None
        """Made when it is needed (``retry.py``)."""
        self.suspect = False
        """It was in flight when a worker broke, and has not got past that point since."""
        self.lost_at = 0
        """Output tokens it had produced then."""
        self.preemptions = 0
        self.finish_reasons: tuple[str, ...] = ()
        self.queued_at = now
        self.dispatched_at: float | None = None
        self.queue_wait_s: float | None = None
        """Seconds in the queue, over all its stays; None while it never left it."""
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.began = False
        """It produced output, in this attempt or an earlier one."""
        self._buffer: list[ChoiceDelta] = []
        self._nudged = False
        self._waiting: list[asyncio.Future[None]] | None = None
        """Who is to look again when something changes; nearly always one, or none."""

    @property
    def choices(self) -> int:
        """How many choices it asked for."""
        return self.prepared.generate.n

    @property
    def lines(self) -> int:
        """Slots it takes at a worker: its choices, or its beams."""
        return self.prepared.generate.lines

    @property
    def usage(self) -> Usage:
        """What ran so far, over all attempts."""
        return self.meter.usage

    @property
    def call_form(self) -> CallForm:
        """In which form the answer holds calls of tools: the model's own, or an upstream worker's."""
        return TAGGED if self.upstream else self.prepared.call_form

    @property
    def moved_on(self) -> bool:
        """Whether a worker failed it or turned it away, so that another one should have it."""
        return self.retries > 0 or bool(self.turned_away)

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.state is TicketState.DONE

    # -- for the dispatcher ---------------------------------------------------------------------------------------

    def dispatched(self, handle: WorkerHandle, now: float, waited_s: float = 0.0) -> None:
        """It was sent to ``handle``."""
        assert self.state is TicketState.QUEUED
        self.state = TicketState.RUNNING
        self.worker = handle.name
        self.ran_on.append(handle)
        self.upstream = handle.hello is not None and handle.hello.upstream
        self.dispatched_at = now
        self.queue_wait_s = waited_s
        self.on_dispatched()

    def requeued(self) -> None:
        """It goes back to the queue; what it produced is void. Only legal while nothing was handed out."""
        assert self.state is TicketState.RUNNING
        assert not self.committed
        self.state = TicketState.QUEUED
        self.worker = None
        self.first_token_at = None
        self._buffer.clear()

    def produced(self, now: float) -> bool:
        """It produced output. True for the first time of an attempt."""
        if self.first_token_at is not None:
            return False
        self.first_token_at = now
        self.began = True
        if self.stream:
            self._changed()
        return True

    def push(self, delta: ChoiceDelta) -> None:
        """Hand one choice's news to the caller; dropped when it is gone."""
        if self.done or self.cancelled:
            return
        self._buffer.append(delta)
        if self.stream:
            self._changed()

    def finish(self, error: ApiError | None, now: float) -> bool:
        """End it. False when it already was."""
        if self.done:
            return False
        self.state = TicketState.DONE
        self.error = error
        self.finished_at = now
        self._changed()
        return True

    # -- for the pipeline -----------------------------------------------------------------------------------------

    async def wait_first(self) -> None:
        """Return when a stream produced its first token, or is over."""
        while self.first_token_at is None and not self.done:
            await self._change()

    async def wait_done(self) -> None:
        """Return when it is over."""
        while not self.done:
            await self._change()

    @property
    def backlog(self) -> int:
        """About how many bytes of a stream wait for the caller."""
        return sum(
            DELTA_BYTES * (1 + len(delta.scored) + len(delta.prompt)) + len(delta.text) for delta in self._buffer
        )

    def nudge(self) -> None:
        """Have ``batches`` hand out an empty batch, unless there is news."""
        self._nudged = True
        self._changed()

    async def batches(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Everything new since the last batch, until the end. Raises the ApiError it ended with, after the last batch.

        Without ``stream`` there is one batch, at the end. A batch is empty where ``nudge`` asked for one.
        """
        while True:
            while not (self.done or self._nudged or (self._buffer and self.stream)):
                await self._change()
            if self.error is not None and not self.committed:
                raise self.error
            if self._buffer:
                batch, self._buffer = self._buffer, []
                self.committed = True
                yield batch
            elif self._nudged:
                yield []
            self._nudged = False
            if self.done and not self._buffer:
                if self.error is not None:
                    raise self.error
                return

    async def _change(self) -> None:
        """Return when something has changed."""
        future = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = [future]
        else:
            self._waiting.append(future)
        await future

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)
