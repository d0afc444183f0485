"""The gateway's side of a run: its own admission, quota, queue, gate and routing, with a clock that is passed in.

Rules
- The order of a request is the pipeline's (``gateway/pipeline.py``): admission → quota reserve → queue → route →
  dispatch → settle. A quota policy that counts who waits hears of each dispatch. The gate is ``gateway.gate``, a
  worker's figures are kept by the gateway's own ``WorkerHandle``, what a request cost by its ``Meter``.
- No clock and no event loop: a quota policy's coroutines are run to their end at once; one that waits for anything
  cannot be simulated, and says so.
- The simulator drives it in virtual time; ``forreal.py`` drives the same object with real engines and the real clock.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from gateway.gate import Claim, Load, Room, fill
from gateway.metering import Meter
from gateway.pace import Answers, Pace
from gateway.simulate.ledger import Ledger
from gateway.simulate.scenario import Use
from gateway.simulate.scenario_file import LoadedScenario
from gateway.simulate.workload import Request, Workload
from gateway.worker_handle import WorkerHandle
from policies.admission.open import OpenAdmission
from policies.queue import Dispatch, JobQueue
from policies.quota.unlimited import UnlimitedQuota
from policies.spi import AdmissionPolicy, Kind, QueueAware, QuotaPolicy, RoutingPolicy, SchedulingPolicy
from policies.types import AdmissionDecision, Charge, Job, JobId, Usage
from workers.protocol import SequenceOutput, StepOutputs

T = TypeVar("T")
_CLAIM: Claim = (1, False)
_ADMITTED = AdmissionDecision(True)


class NotSimulable(ValueError):  # noqa: N818 - a statement about a policy
    """A policy needs something that only the running gateway has."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request at a worker."""

    request: Request
    job: Job
    handle: WorkerHandle
    load: Load
    meter: Meter


class Front:
    """Everything of the gateway that decides when and where a request runs."""

    def __init__(self, loaded: LoadedScenario, workload: Workload) -> None:
        scenario = loaded.scenario

        def build(kind: Kind, use: Use) -> Any:
            return loaded.registry.build(kind, use.use, use.with_, loaded.context())

        caps = scenario.queue
        self.queue = JobQueue(
            cast(SchedulingPolicy, build("scheduling", scenario.policy)),
            max_running_per_tenant=caps.max_running_per_tenant,
            max_running_tokens_per_tenant=caps.max_running_tokens_per_tenant,
            max_running_per_class=caps.max_running_per_class,
            max_passed=caps.max_overtaken,
        )
        self.ledger = Ledger(scenario)
        self.dispatched = 0
        self._admission = cast(AdmissionPolicy, build("admission", scenario.admission))
        self._admits_all = isinstance(self._admission, OpenAdmission)
        quota = cast(QuotaPolicy, build("quota", scenario.quota))
        self._quota = None if isinstance(quota, UnlimitedQuota) else quota
        self._queue_aware = quota if isinstance(quota, QueueAware) else None
        self._routing = cast(RoutingPolicy, build("routing", scenario.routing))
        self._workload = workload
        self._handles: list[WorkerHandle] = []
        self._by_name: dict[str, WorkerHandle] = {}
        self._step_tokens = scenario.workers.max_step_tokens
        self._waiting: dict[JobId, Request] = {}
        self._flights: dict[str, Flight] = {}
        self._at: dict[str, dict[str, Flight]] = {}
        self._open = True
        """False while every room is closed: only a report opens one."""
        self._rooms: list[Room] = []
        """As the last turn left them; none when a worker has reported since."""
        self._answers = Answers()
        self._paces: dict[str, Pace] = {}

    def join(self, handle: WorkerHandle) -> None:
        """One more worker that is ready."""
        self._handles.append(handle)
        self._by_name[handle.name] = handle
        self._at[handle.name] = {}
        self._paces[handle.name] = Pace(self._answers)

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._waiting or self._flights)

    def waits_anyway(self, request: Request) -> bool:
        """Whether all that can become of it now is that it joins its tenant's line."""
        return not self._open and self._admits_all and self.ledger.waits(request.tenant)

    def arrive(self, request: Request, now: float) -> None:
        """A request comes in. It is queued, or refused; call ``turn`` afterwards."""
        ledger, tenant = self.ledger, request.tenant
        ledger.accounts[tenant].arrived += 1
        job = self._workload.job(request)
        admission = self._admit(job, now)
        if not admission.admitted:
            ledger.refused(tenant, admission.reason or "not_admitted")
            return
        most = admission.clamp_max_tokens
        if most is not None and most < job.max_tokens:
            job, request = replace(job, max_tokens=most), replace(request, output=min(request.output, most))
        if (limit := self._over_quota(job, now)) is not None:
            ledger.refused(tenant, limit)
            return
        self.queue.offer(job, now)
        self._waiting[job.id] = request
        ledger.queued(tenant)

    def turn(self, now: float) -> None:
        """Drop whose wait is over, then send what fits."""
        queue = self.queue
        for job in queue.expire(now):
            self._expired(job, now)
        if not len(queue):
            return
        rooms = self._rooms
        # A room keeps count of what is sent to it, so it holds until its worker has news or is silent for too long.
        if not rooms or any(handle.is_stale(now) for handle in self._handles):
            rooms = self._rooms = [self._room(handle, now) for handle in self._handles if handle.available(now)]
            self._open = True
        if self._open:
            self._open = fill(
                queue,
                rooms,
                now,
                claim=_claim,
                could_fit=_could_fit,
                send=lambda dispatch, rooms: self._send(dispatch, rooms, now),
            )

    def report(self, handle: WorkerHandle, outputs: StepOutputs, now: float) -> None:
        """A worker's news. Call ``turn`` afterwards."""
        handle.received(outputs)
        self._rooms = []
        self._open = True
        flights, take, charge, served = self._flights, self._take, self.queue.charge, self.ledger.served
        decodes: dict[int, Charge] = {}
        for output in outputs.outputs:
            flight = flights.get(output.id)
            if flight is None:
                continue
            if output.finish is not None or not flight.load.started:
                take(flight, output, now)
                continue
            # Most of all outputs are a few more tokens of an answer under way, and as many for each of a step.
            new = flight.meter.produced(0, output.output_tokens)
            if new:
                known = decodes.get(new)
                if known is None:
                    known = decodes[new] = Charge(output=new)
                served(flight.request.tenant, known)
                charge(flight.job.id, known, now)

    def rest(self, handle: WorkerHandle) -> int:
        """Steps of this worker after which a queued job might go there though nothing else changes; 0: none will."""
        return self._paces[handle.name].rest if len(self.queue) else 0

    def answer(self, job_id: str) -> int:
        """How many tokens a dispatched request will produce."""
        return self._flights[job_id].request.output

    def next_expiry(self) -> float | None:
        """When a queued job's wait may be over."""
        return self.queue.next_expiry()

    def idle_room(self, now: float) -> bool:
        """Whether a queued job could run now: after a ``turn`` it must not be so. O(queued).

        While others wait for a job that lacks room, it alone counts.
        """
        rooms = [self._room(handle, now) for handle in self._handles if handle.available(now)]
        rooms = [room for room in rooms if room.open]
        held = self.queue.held(_could_fit)
        jobs = self.queue.queued_jobs() if held is None else [held]
        return any(room.fits(job, 1, suspect=False) for job in jobs for room in rooms)

    def _admit(self, job: Job, now: float) -> AdmissionDecision:
        """What admission says. One that refuses nobody is not asked."""
        if self._admits_all:
            return _ADMITTED
        snapshot = self.queue.snapshot(job.tenant, weight=job.weight, workers_ready=len(self._handles))
        return self._admission.check(job, snapshot, now)

    def _over_quota(self, job: Job, now: float) -> str | None:
        """The limit that it would exceed."""
        if self._quota is None:
            return None
        quota = at_once(self._quota.reserve(job, now))
        return None if quota.admitted else quota.limit or "quota"

    def _settle(self, job: Job, usage: Usage, now: float) -> None:
        if self._quota is not None:
            at_once(self._quota.settle(job.id, usage, now))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _room(self, handle: WorkerHandle, now: float) -> Room:
        loads = [flight.load for flight in self._at[handle.name].values()]
        return Room.of(
            handle.view(now),
            loads,
            self._step_tokens,
            stale=handle.is_stale(now),
            pace=self._paces[handle.name],
            step=handle.step,
        )

    def _send(self, dispatch: Dispatch, rooms: list[Room], now: float) -> None:
        job = dispatch.job
        room = rooms[0] if len(self._handles) == 1 else self._route(job, rooms, now)
        handle = self._by_name[room.reported.name]
        request = self._waiting.pop(job.id)
        footprint = self._paces[handle.name].footprint(job.prompt_tokens, job.max_tokens)
        load = Load(job.prompt_tokens, 1, started=False, footprint=footprint, sent_step=handle.step)
        flight = Flight(request, job, handle, load, Meter(job.prompt_tokens, 1))
        self._flights[job.id] = self._at[handle.name][job.id] = flight
        handle.send(self._workload.generate(request, job))
        room.take(job, 1, suspect=False)
        if self._queue_aware is not None:
            self._queue_aware.started(job.id)
        self.dispatched += 1
        self.ledger.left(request.tenant)
        self.ledger.accounts[request.tenant].waits.append(dispatch.waited_s)

    def _route(self, job: Job, rooms: list[Room], now: float) -> Room:
        fitting = {room.reported.name: room for room in rooms if room.fits(job, 1, suspect=False)}
        return fitting[self._routing.choose(job, [room.view for room in fitting.values()], now).worker]

    def _take(self, flight: Flight, output: SequenceOutput, now: float) -> None:
        produced = output.output_tokens
        if not flight.load.started:
            self._progress(flight, output, now)
        charge = flight.meter.observe(0, output.prompt_computed, output.prompt_cached, produced)
        news = charge.output or charge.prompt or charge.cached
        if news:
            self.ledger.served(flight.request.tenant, charge)
        if output.finish is not None:
            self._finish(flight, output, now, charge)
        elif news:
            self.queue.charge(flight.job.id, charge, now)

    def _progress(self, flight: Flight, output: SequenceOutput, now: float) -> None:
        """Until its first token: what the gate must know of it."""
        load, done = flight.load, output.prompt_computed + output.prompt_cached
        started = output.output_tokens > 0
        load.advance(max(0, flight.job.prompt_tokens - done) if done else load.prompt_left, started=started)
        if started:
            account = self.ledger.accounts[flight.request.tenant]
            account.ttfts.append(now - flight.request.at)
            account.first_tokens.append(now)

    def _finish(self, flight: Flight, output: SequenceOutput, now: float, charge: Charge) -> None:
        job = flight.job
        usage = self.queue.finish(job.id, charge, now)
        self._settle(job, usage, now)
        del self._flights[job.id]
        del self._at[flight.handle.name][job.id]
        account = self.ledger.accounts[flight.request.tenant]
        if output.finish == "error":
            account.failed += 1
            return
        account.finished += 1
        self._answers.ended(output.output_tokens, job.max_tokens)
        account.finishes.append(now)
        account.latencies.append(now - flight.request.at)

    def _expired(self, job: Job, now: float) -> None:
        request = self._waiting.pop(job.id)
        self._settle(job, Usage(), now)
        self.ledger.left(request.tenant)
        self.ledger.refused(request.tenant, "queue_timeout")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing. Raises NotSimulable for one that does."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    work.close()
    raise NotSimulable("the quota policy waits for something outside this process; simulate with one that does not")


def _claim(job: Job) -> Claim:
    return _CLAIM


def _could_fit(job: Job) -> bool:
    return True
