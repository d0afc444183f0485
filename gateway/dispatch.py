"""The single owner of one model's queue and of everything of it that is in flight.

Rules
- Runs on the event loop. A turn takes jobs from the queue, picks a worker and sends, without any await: a job is queued
  or in flight, never between. Turns are woken by a submission, by output that frees room, by workers and swaps, and by
  a timer for expiry. Wake-ups in one loop iteration make one turn, in the next; or at once where who submits is the
  last (``hasten``). What a turn sends to a worker goes out together, with the turn's last job.
- Late binding: ``gate.py`` says what may be sent; everything else stays in the queue, in the live policy's order.
- A foreign policy that fails stops no turn: routing falls back to the least loaded worker, scheduling to another policy
  (``policies/guard.py``); both are logged and counted.
- What comes back from workers is ``landing.py``'s, what both share ``desk.py``'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gateway import log
from gateway import trace_attributes as attributes
from gateway.asking import message_for
from gateway.desk import Desk, try_send
from gateway.errors import internal, no_worker, revoked, shutting_down, waited_out
from gateway.flights import Flight
from gateway.gate import Claim, Load, Room, fill, suits
from gateway.hints import Hints
from gateway.landing import Landing
from gateway.models import ModelHandle
from gateway.monitor import Monitor
from gateway.pool_roles import PoolRoles
from gateway.prefill import Prefill
from gateway.settings import Queue
from gateway.ticket import CancelledByCaller, Ticket, TicketState
from gateway.trace import NO_TRACE, RequestTrace
from gateway.worker_handle import WorkerGoneError, WorkerHandle, WorkerLoss, WorkerState
from policies.guard import Failover
from policies.queue import Dispatch, JobQueue
from policies.scheduling.fcfs import FcfsScheduler
from policies.shadow import ShadowPolicy, unshadowed
from policies.spi import RoutingPolicy, SchedulingPolicy
from policies.types import Job, JobId, QueueSnapshot, RequeueReason, RouteDecision, TenantId, Transition
from workers.protocol import Keep, StepOutputs

if TYPE_CHECKING:
    from gateway.intake import Prepared

_log = log.get("dispatch")

TICK_S = 0.5
"""While jobs wait, a turn is tried at least so often: breakers reopen and figures become stale without an event."""


class Dispatcher:
    """One model's queue, and its requests at the model's workers. A ``gateway.pool_listener.PoolListener``."""

    def __init__(
        self,
        model: ModelHandle,
        policy: SchedulingPolicy,
        policy_name: str,
        routing: Callable[[], RoutingPolicy],
        *,
        monitor: Monitor | None = None,
        caps: Queue | None = None,
        fallback: Callable[[], SchedulingPolicy] = FcfsScheduler,
        on_failover: Callable[[Failover], None] = lambda failover: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``routing`` returns the live policy, ``fallback`` makes what goes on where a scheduling policy fails."""
        self._desk = Desk(
            model,
            policy,
            policy_name,
            monitor=monitor or Monitor(),
            caps=caps,
            fallback=fallback,
            on_failover=on_failover,
            clock=clock,
        )
        self._handles: dict[str, WorkerHandle] = {}
        self._prefill = Prefill(self._handles, routing, self._desk.monitor)
        self._roles = PoolRoles(model.name, model.config.pools, self._handles, self._prefill)
        self._landing = Landing(self._desk, self._roles)
        self._routing = routing
        self._hints = Hints()
        self._stale: set[str] = set()
        self._closing = False
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def model(self) -> ModelHandle:
        """The model it serves."""
        return self._desk.model

    @property
    def queue(self) -> JobQueue:
        """The queue, to read. Only this dispatcher changes it."""
        return self._desk.queue

    # -- for the pipeline -----------------------------------------------------------------------------------------

    def submit(self, prepared: Prepared, *, stream: bool = False, trace: RequestTrace = NO_TRACE) -> Ticket:
        """Queue a request. Raises ApiError: 503 while shutting down, 500 for a quarantined request."""
        if self._closing:
            raise shutting_down()
        now = self._desk.clock()
        ticket = Ticket(prepared, now=now, stream=stream, trace=trace)
        self._landing.inspect(ticket, now)
        self._desk.enter(ticket, now)
        self._desk.monitor.event(ticket.job, Transition.QUEUED, now)
        self.wake()
        return ticket

    def cancel(self, ticket: Ticket, reason: str = "client_disconnected") -> None:
        """Its caller gave up. A queued one ends at once, a running one when its worker has let go (or ``abandon``)."""
        if ticket.done:
            return
        ticket.cancelled = True
        flight = self._desk.flights.get(ticket.job.id)
        if ticket.state is TicketState.RUNNING and flight is not None:
            self._desk.stop(flight)
        else:
            self.abandon(ticket, reason)

    def abandon(self, ticket: Ticket, reason: str = "client_disconnected") -> None:
        """End a cancelled ticket with what is known; what its worker reports later only frees its slot."""
        self._desk.end(ticket, CancelledByCaller(reason), self._desk.clock())

    def keep(self, ticket: Ticket, keep: bool) -> None:
        """The last word on the request's trace, to every worker that has timings of it."""
        for handle in ticket.ran_on:
            try_send(handle, Keep(id=ticket.job.id, keep=keep))

    def view(self, job: Job) -> QueueSnapshot:
        """What an admission policy may look at."""
        return self.queue.snapshot(job.tenant, weight=job.weight, workers_ready=self.ready_for(job))

    def ready_for(self, job: Job, choices: int | None = None) -> int:
        """Workers that could run ``job``: ready, of a pool with its labels and class; with room for ``choices``."""
        return len([1 for one in self._prefill.serving if one.state is WorkerState.READY and suits(one, job, choices)])

    # -- for the operator -----------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers that said hello and are not lost, by name."""
        return [self._handles[name] for name in sorted(self._handles)]

    @property
    def ready(self) -> int:
        """Ready workers that run requests."""
        return sum(handle.state is WorkerState.READY for handle in self._prefill.serving)

    @property
    def in_flight(self) -> int:
        """Requests that occupy a worker, also those whose caller has gone."""
        return len(self._desk.flights)

    @property
    def tickets(self) -> list[Ticket]:
        """Every open request, oldest submission first; to read."""
        return list(self._desk.tickets.values())

    def revoke(self, job_id: str) -> bool:
        """End one request because the operator says so, with 403 (in-band once it streams). False: it is not here."""
        ticket = self._desk.tickets.get(JobId(job_id))
        if ticket is None:
            return False
        flight = self._desk.flights.get(job_id)
        if flight is not None:
            self._desk.stop(flight)
        self._desk.end(ticket, revoked(), self._desk.clock())
        return True

    def lags(self) -> Mapping[TenantId, float]:
        """Virtual time by which each waiting tenant is behind the best served one."""
        return self.queue.virtual_lag(self._desk.clock())

    def shares(self) -> Mapping[TenantId, float]:
        """Each tenant's part of what was served in about the last half minute."""
        return self.queue.shares(self._desk.clock())

    def stalled(self) -> bool:
        """Whether a job waits that could run now, with no turn due: a fault of ours, never of load."""
        if self._woken or not len(self.queue):
            return False
        now = self._desk.clock()
        rooms = [self._desk.flights.room(handle, now) for handle in self._prefill.serving if handle.available(now)]
        rooms = [room for room in rooms if room.open]
        return all(
            self._roles.has_room(ticket, rooms, now)
            for job in self.queue.queued_jobs()
            if (ticket := self._desk.tickets[job.id])
        )

    def snapshot(self, limit: int = 100) -> dict[str, Any]:
        """The queue as ``/admin/queue`` shows it."""
        return {**self._desk.snapshot(limit), "workers_ready": self.ready}

    def swap(
        self, policy: SchedulingPolicy, name: str, *, carry_state: bool = True, probation: bool = True
    ) -> SchedulingPolicy:
        """Replace the scheduling policy, keeping every queued job; returns the old one. A failure changes nothing."""
        old = self._desk.swap(policy, name, carry_state=carry_state, probation=probation)
        self.wake()
        return old

    @property
    def scheduling(self) -> tuple[str, SchedulingPolicy]:
        """The scheduling policy that is asked now, with its name."""
        return self._desk.policy_name, unshadowed(self._desk.guard.policy)

    def shadow(self, candidate: SchedulingPolicy | None) -> ShadowPolicy | None:
        """Have ``candidate`` watch the live policy from now on; None: nobody. Raises what the candidate raises."""
        live = self._desk.guard.policy = self.scheduling[1]
        if candidate is None:
            return None
        shadow = ShadowPolicy(live, candidate, self.queue.queued_jobs(), self._desk.clock())
        self._desk.guard.policy = shadow
        return shadow

    def cap(self, caps: Queue) -> None:
        """What may run at once from now on."""
        self._desk.cap(caps)
        self.wake()

    def close(self) -> None:
        """Take no new requests; what is here goes on."""
        self._closing = True

    async def wait_idle(self) -> None:
        """Return when no request is queued or running."""
        await self._desk.wait_idle()

    def abort(self) -> None:
        """End every request that is still here with 503 (in-band once it streams), and stop the timer."""
        self.close()
        for ticket in list(self._desk.tickets.values()):
            flight = self._desk.flights.get(ticket.job.id)
            if flight is not None:
                self._desk.stop(flight)
            self._desk.end(ticket, shutting_down(), self._desk.clock())
        self._disarm()

    # -- for the pools --------------------------------------------------------------------------------------------

    def on_ready(self, handle: WorkerHandle) -> None:
        """A worker may be sent work."""
        self._handles[handle.name] = handle
        if handle.hello is not None:
            self.model.worker_up(handle.name, handle.hello)
        self.wake()

    def on_outputs(self, handle: WorkerHandle, outputs: StepOutputs) -> None:
        """News of one or several steps."""
        self._stale.discard(handle.name)
        self._landing.outputs(handle, outputs)
        if len(self.queue):
            self.wake()

    def on_lost(self, handle: WorkerHandle, reason: WorkerLoss) -> None:
        """A worker is gone with everything it had."""
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]
            self.model.worker_gone(handle.name)
        self._stale.discard(handle.name)
        self._landing.lost(handle, reason)
        self.wake()

    # -- turns ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self.hasten)

    def hasten(self) -> None:
        """Have the turn that is due, if one is: nobody else submits anything in this iteration of the loop."""
        if not self._woken:
            return
        self._woken = False
        now = self._desk.clock()
        try:
            for job in self.queue.expire(now):
                self._expired(self._desk.tickets[job.id], now)
            if len(self.queue):
                self._fill(now)
                self._hints.give(self.queue.demand, self._prefill.serving, now)
            self.queue.left_over = len(self.queue) > 0
        except Exception as error:  # not even the fallback works: the jobs stay, their wait runs out at worst
            policy = self._desk.policy_name
            _log.error("turn_failed", model=self.model.name, policy=policy, failure=log.describe(error))
            self._desk.monitor.fault("scheduling")
        self._arm(now)

    def _arm(self, now: float) -> None:
        self._disarm()
        if len(self.queue) or self.queue.owes:
            expiry = self.queue.next_expiry()
            delay = TICK_S if expiry is None else min(TICK_S, max(0.0, expiry - now) + 0.001)
            self._timer = asyncio.get_running_loop().call_later(delay, self.wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fill(self, now: float) -> None:
        fill(
            self.queue,
            [self._desk.flights.room(handle, now) for handle in self._prefill.serving if handle.available(now)],
            now,
            claim=self._claim,
            could_fit=self._could_fit,
            send=lambda dispatch, rooms: self._dispatch(dispatch, rooms, now),
            may=lambda job, room: self._roles.may(self._desk.tickets[job.id], room.reported, now),
        )

    def _claim(self, job: Job) -> Claim:
        ticket = self._desk.tickets[job.id]
        return ticket.lines, ticket.suspect

    def _could_fit(self, job: Job) -> bool:
        """Others would stand still for its sake: not for a suspect's, nor for one that waits for a prefill worker."""
        ticket = self._desk.tickets[job.id]
        waits = ticket.suspect or self._prefill.busy_for(ticket, self._desk.clock())
        return not waits and self.ready_for(job, ticket.lines) > 0

    def _dispatch(self, dispatch: Dispatch, rooms: list[Room], now: float) -> None:
        """Send one job. Whatever fails on the way ends that job only."""
        ticket = self._desk.tickets[dispatch.job.id]
        try:
            self._send(ticket, dispatch, rooms, now)
        except Exception as error:
            _log.error("dispatch_broke", job=dispatch.job.id, failure=log.describe(error))
            self._desk.monitor.fault("dispatch")
            self._desk.end(ticket, internal(), now)

    def _send(self, ticket: Ticket, dispatch: Dispatch, rooms: list[Room], now: float) -> None:
        job = ticket.job
        self._desk.picked(ticket, dispatch)
        room, decision = self._route(ticket, rooms, now)
        handle = self._handles[decision.worker]
        prepared, choices, generate = ticket.prepared, ticket.prepared.choices(), ticket.prepared.generate
        asked = (generate.params, self.model.name, generate.max_tokens, generate.n, prepared.request.endpoint)
        ticket.span = ticket.trace.begin_chat(self.model.name, attributes.chat_request, *asked, ticket.stream)
        try:
            source = self._prefill.send(ticket, handle, message_for(handle, prepared, ticket.trace.inject()), now)
        except WorkerGoneError as error:
            _log.warning("dispatch_failed", worker=handle.name, job=job.id, why=str(error))
            rooms.remove(room)
            ticket.span.fail("worker_gone")
            self.queue.requeue(job.id, now, RequeueReason.WORKER_REFUSED)
            self._desk.queued_again(ticket, RequeueReason.WORKER_REFUSED)
            return
        if not len(self.queue):
            handle.flush()
        load = Load(job.prompt_tokens if source is None else 1, ticket.lines, started=False, suspect=ticket.suspect)
        self._desk.flights.add(Flight(ticket, handle, choices, set(range(ticket.choices)), load, source))
        ticket.dispatched(handle, now, dispatch.waited_s)
        if dispatch.attempt == 1:
            self._landing.budget.earn()
        if room.stale:
            self._report_stale(handle)
        room.take(job, ticket.lines, suspect=ticket.suspect, prompt=load.prompt_left)
        self._desk.monitor.routed(decision)
        self._desk.monitor.event(job, Transition.DISPATCHED, now, worker=handle.name)

    def _route(self, ticket: Ticket, rooms: list[Room], now: float) -> tuple[Room, RouteDecision]:
        """Ask the routing policy; one that fails or names nobody is replaced by the worker with least in flight."""
        job = ticket.job
        span = ticket.trace.begin("route")
        open_ = [room for room in rooms if room.fits(job, ticket.lines, suspect=ticket.suspect)]
        fitting = {room.reported.name: room for room in self._roles.narrowed(ticket, open_, now)}
        try:
            decision = self._routing().choose(job, [room.view for room in fitting.values()], now)
            room = fitting[decision.worker]
        except Exception as error:
            _log.error("routing_failed", model=self.model.name, failure=log.describe(error))
            self._desk.monitor.fault("routing")
            room = min(fitting.values(), key=lambda room: room.view.inflight)
            decision = RouteDecision(room.reported.name, "load")
        span.set(attributes.routed, decision, len(fitting))
        span.end()
        return room, decision

    def _report_stale(self, handle: WorkerHandle) -> None:
        if handle.name not in self._stale:
            self._stale.add(handle.name)
            _log.warning("worker_stale", worker=handle.name, meaning="only in-flight counts gate it")
        self._desk.monitor.stale(handle.name)

    def _expired(self, ticket: Ticket, now: float) -> None:
        """Its wait ran out; the queue has let go of it already."""
        healthy = self.ready_for(ticket.job, ticket.lines)
        self._desk.end(ticket, waited_out(self._desk.drain_s()) if healthy else no_worker(ticket.job.model), now)
