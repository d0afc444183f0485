"""The table of one model's open requests, which dispatching (``dispatch.py``) and landing (``landing.py``) share.

Rules
- A ticket is here from its submission to its end; its job is meanwhile in the queue or running there, never in between.
- ``end`` is the only way out, and works once: it takes the job out of the queue core, makes the scheduler's last
  charge and wakes whoever waits. A flight may outlive its ticket (``flights.py``).
- The scheduling policy is behind a ``Guarded``: when it fails another one goes on with the same jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from gateway import log
from gateway import trace_attributes as attributes
from gateway.collection import without_collection
from gateway.errors import ApiError
from gateway.flights import Flight, Flights
from gateway.models import ModelHandle
from gateway.monitor import Monitor
from gateway.settings import Queue
from gateway.ticket import Ticket, TicketState
from gateway.worker_handle import WorkerGoneError, WorkerHandle
from policies.caps import Caps
from policies.guard import Failover, Guarded
from policies.queue import Dispatch, JobQueue
from policies.scheduling.fcfs import FcfsScheduler
from policies.shadow import unshadowed
from policies.spi import SchedulingPolicy
from policies.types import Charge, JobId, RequeueReason, TenantId
from workers.protocol import Cancel, Down

_log = log.get("dispatch")

MAX_RETRY_AFTER_S = 60.0
_NOTHING = Charge()


class Desk:
    """Tickets, queue and flights of one model."""

    def __init__(
        self,
        model: ModelHandle,
        policy: SchedulingPolicy,
        policy_name: str,
        *,
        monitor: Monitor,
        caps: Queue | None = None,
        fallback: Callable[[], SchedulingPolicy] = FcfsScheduler,
        on_failover: Callable[[Failover], None] = lambda failover: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.monitor = monitor
        self.clock = clock
        self._fallback = fallback
        self._on_failover = on_failover
        self.guard = self._guarded(policy, policy_name)
        self.queue = JobQueue(self.guard)
        self.guard.arm(self.queue, clock())
        self.cap(caps or Queue())
        self.tickets: dict[JobId, Ticket] = {}
        self.flights = Flights({pool.name: pool.engine.max_step_tokens for pool in model.config.pools})
        self._idle = asyncio.Event()
        self._idle.set()

    def cap(self, caps: Queue) -> None:
        """What may run at once from now on; what runs already goes on."""
        self.queue.caps = Caps(
            caps.max_running_per_tenant, caps.max_running_tokens_per_tenant, dict(caps.max_running_per_class)
        )
        self.queue.max_passed = caps.max_overtaken

    @property
    def policy_name(self) -> str:
        """The scheduling policy that is asked now."""
        return self.guard.name

    def swap(self, policy: SchedulingPolicy, name: str, *, carry_state: bool, probation: bool) -> SchedulingPolicy:
        """Replace the scheduling policy, keeping every queued job; returns the old one. A failure changes nothing."""
        now, old, guard = self.clock(), self.guard, self._guarded(policy, name)
        with without_collection():
            self.queue.swap(guard, now, carry_state=carry_state)
        old.policy = unshadowed(old.policy)
        guard.arm(self.queue, now, old if probation else None)
        self.guard = guard
        return old.policy

    def enter(self, ticket: Ticket, now: float) -> None:
        """Queue it. Raises ValueError for an id that is here already."""
        job = ticket.job
        entry = self.queue.offer(job, now)
        self.tickets[job.id] = ticket
        self._idle.clear()
        ticket.span = ticket.trace.begin("queue")
        ticket.span.set(
            attributes.queued,
            self.policy_name,
            tenant=job.tenant,
            service_class=job.service_class,
            weight=job.weight,
            depth=entry.depth,
            depth_tenant=entry.depth_tenant,
            position=entry.position - 1,
        )

    def requeue(self, tickets: list[Ticket], reason: RequeueReason, now: float) -> None:
        """Back to the front of their tenants' lines, in the order in which they first came."""
        self.queue.requeue_all([ticket.job.id for ticket in tickets], now, reason)
        for ticket in tickets:
            if ticket.span is not None:
                ticket.span.fail(reason.value)
            ticket.requeued()
            self.queued_again(ticket, reason)

    def queued_again(self, ticket: Ticket, reason: RequeueReason) -> None:
        """Begin its next queue span: it stands first in its tenant's line."""
        job = ticket.job
        ticket.span = ticket.trace.begin("queue")
        ticket.span.set(
            attributes.queued,
            self.policy_name,
            tenant=job.tenant,
            service_class=job.service_class,
            weight=job.weight,
            depth=len(self.queue) - 1,
            depth_tenant=self.queue.snapshot(job.tenant).queued_tenant - 1,
            position=0,
            requeued=reason.value,
        )

    def picked(self, ticket: Ticket, dispatch: Dispatch) -> None:
        """The queue let go of it, for these reasons."""
        if ticket.span is not None:
            ticket.span.set(
                attributes.picked, dispatch.pick, dispatch.waited_s, dispatch.waited_behind, policy=self.policy_name
            )

    def charge(self, ticket: Ticket, charge: Charge, now: float) -> None:
        """Work ran for it."""
        self.queue.charge(ticket.job.id, charge, now)
        self.monitor.served(ticket.job, charge)

    def stop(self, flight: Flight, index: int | None = None) -> None:
        """Tell the worker to let go of it, or of one choice that a stop string ended."""
        if flight.open:
            try_send(flight.handle, Cancel(flight.ticket.job.id, index))
        if index is None:
            self.stop_prefill(flight)

    def stop_prefill(self, flight: Flight) -> None:
        """Tell the worker that computes its prompt, if it still does."""
        if flight.prefill is not None and flight.ticket.job.id in flight.prefill.inflight_ids:
            try_send(flight.prefill, Cancel(flight.ticket.job.id))

    def end(self, ticket: Ticket, error: ApiError | None, now: float) -> None:
        """It is over: with ``error``, or well. Does nothing for one that was over before."""
        if ticket.done:
            return
        job = ticket.job
        queued = ticket.state is TicketState.QUEUED
        ticket.finish(error, now)
        self.tickets.pop(job.id, None)
        try:
            if not self.queue.discard(job.id):
                with contextlib.suppress(KeyError):  # expired: the queue has let go of it already
                    self.queue.finish(job.id, _NOTHING, now)
        except Exception as failure:  # not even the fallback works: its caller must have an end all the same
            self.monitor.fault("scheduling")
            _log.error("scheduling_failed", policy=self.policy_name, failure=log.describe(failure))
        self._end_span(ticket, error, now, queued=queued)
        if not self.tickets:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when no request is queued or running."""
        await self._idle.wait()

    def snapshot(self, limit: int) -> dict[str, Any]:
        """Counts per tenant and the first ``limit`` queued jobs. No content, no user."""
        now = self.clock()
        running: dict[TenantId, int] = {}
        for ticket in self.tickets.values():
            if ticket.state is TicketState.RUNNING:
                running[ticket.job.tenant] = running.get(ticket.job.tenant, 0) + 1
        backlog, shares, served = self.queue.backlog(), self.queue.shares(now), self.queue.served()
        return {
            "model": self.model.name,
            "policy": self.policy_name,
            "queued": len(self.queue),
            "running": self.queue.running,
            "in_flight": len(self.flights),
            "tenants": {
                tenant: {
                    "queued": backlog.get(tenant, (0, 0))[0],
                    "queued_tokens": backlog.get(tenant, (0, 0))[1],
                    "running": running.get(tenant, 0),
                    "served_tokens": served.get(tenant, 0),
                    "share": round(shares.get(tenant, 0.0), 4),
                }
                for tenant in sorted({*backlog, *running, *shares, *served})
            },
            "jobs": [self._describe(self.tickets[job.id], now) for job in self.queue.queued_jobs()[:limit]],
        }

    def drain_s(self) -> float:
        """Seconds until what is queued now will have run, at the rate of late."""
        snapshot = self.queue.snapshot(TenantId(""))
        if not snapshot.service_rate:
            return 1.0
        return min(MAX_RETRY_AFTER_S, max(1.0, snapshot.queued_tokens / snapshot.service_rate))

    def _guarded(self, policy: SchedulingPolicy, name: str) -> Guarded:
        return Guarded(policy, name, fallback=self._fallback, on_failover=self._failed_over)

    def _failed_over(self, failover: Failover) -> None:
        self.monitor.fault("scheduling")
        _log.error(
            "scheduling_rolled_back" if failover.rolled_back else "scheduling_fell_back",
            model=self.model.name,
            policy=failover.failed,
            call=failover.call,
            successor=failover.successor,
            queued=len(self.queue),
            failure=log.describe(failover.error),
        )
        self._on_failover(failover)

    def _describe(self, ticket: Ticket, now: float) -> Mapping[str, Any]:
        job = ticket.job
        return {
            "id": job.id,
            "tenant": job.tenant,
            "class": job.service_class,
            "prompt_tokens": job.prompt_tokens,
            "max_tokens": job.max_tokens,
            "waited_s": round(now - ticket.queued_at, 3),
            "retries": ticket.retries,
        }

    def _end_span(self, ticket: Ticket, error: ApiError | None, now: float, *, queued: bool) -> None:
        span, ticket.span = ticket.span, None
        if span is None:
            return
        if queued:
            span.set(attributes.left_queue, now - ticket.queued_at)
        else:
            first = None
            if ticket.first_token_at is not None and ticket.dispatched_at is not None:
                first = ticket.first_token_at - ticket.dispatched_at
            span.set(
                attributes.chat_response,
                ticket.usage,
                model=self.model.name,
                finish_reasons=ticket.finish_reasons,
                first_chunk_s=first,
            )
        if error is not None and error.outcome != "cancelled":
            span.fail(error.reason or error.outcome)
        span.end()


def try_send(handle: WorkerHandle, message: Down) -> None:
    """Send to a worker that may have gone: then there is nobody left to tell."""
    try:
        handle.send(message)
    except WorkerGoneError:
        return
