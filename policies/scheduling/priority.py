"""``priority``: higher priorities first, with floors for lower ones and ageing; fair shares inside a priority.

Source: multilevel feedback queues (Corbató et al., "An Experimental Time-Sharing System", 1962) for ageing; floors as
the guaranteed rates of class-based queueing (Floyd, Jacobson, 1995); inside a priority ``vtc``.

Rules
- A job's priority is its class's (``Job.priority``); a caller may lower its class, never raise it (the gateway's intake
  sees to it). Jobs of one priority share by ``vtc``, whatever their classes.
- A floor belongs to a priority; it is named by the number or by any class of that priority (several add up). While jobs
  of that priority wait, it gets at least that part of the service, less about one job (``_floors.py``).
- A job that waited ``ageing_s`` moves up to the next higher priority that has been seen, and so on after each further
  ``ageing_s``. It is charged where it runs.
- Priority decides who starts. What runs is not stopped: to keep slots free for the high ones, cap the low classes
  (``queue.max_running_per_class``).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Mapping

from pydantic import Field, field_validator

from policies.scheduling._dumps import read_service
from policies.scheduling._floors import Floors
from policies.scheduling._lengths import Lengths, PredictingConfig
from policies.scheduling._lines import Seat
from policies.scheduling._tariff import Prepaid, Tariff
from policies.scheduling.edf import check_floors
from policies.scheduling.vtc import VtcScheduler
from policies.spi import Fits, Json, PolicyContext, PolicySpec
from policies.types import Charge, Job, JobId, Pick, RequeueReason


class PriorityConfig(PredictingConfig):
    """Floors, ageing, cost per token, prediction."""

    floors: dict[str, float] = Field(default_factory=dict)
    """Class or priority → part of the service while it waits."""
    ageing_s: float | None = Field(120.0, gt=0, allow_inf_nan=False)
    """Wait after which a job moves up one priority; null: never."""

    @field_validator("floors")
    @classmethod
    def _add_up(cls, floors: dict[str, float]) -> dict[str, float]:
        return check_floors(floors)


class _Band(VtcScheduler):
    """The jobs of one priority."""

    ordinary = False
    """Whether it is this priority's ordinary turn, not one of its floor."""

    def relative(self) -> dict[str, float]:
        """Counters above the band's level: those of different bands have nothing else in common."""
        level = self._floor()
        return {str(tenant): seat.counter - level for tenant, seat in self.seats.items()}


class _CountedBand(_Band):
    """One that tells the floors what it is served."""

    def __init__(self, priority: int, tariff: Tariff, lengths: Lengths, paid: Prepaid, floors: Floors[int]) -> None:
        super().__init__(tariff, lengths, paid=paid)
        self._priority = priority
        self._floors = floors

    def _counted(self, seat: Seat, cost: float) -> None:
        if self._floors.granted:
            self._floors.serve(self._priority, cost, ordinary=self.ordinary)


class PriorityScheduler:
    """O(log n) per operation, and O(priorities) for those that are empty."""

    def __init__(self, config: PriorityConfig) -> None:
        self._tariff = config.tariff()
        self._lengths = config.lengths()
        self._paid = Prepaid(self._tariff)
        self._named = config.floors
        self._ageing_s = config.ageing_s
        self._bands: dict[int, _Band] = {}
        self._order: list[int] = []  # negated, so that the highest comes first
        self._known: dict[JobId, tuple[int, int, Job]] = {}
        """Queued and running jobs: (priority, serial number while queued and 0 while running, job)."""
        self._queued = 0
        self._ages: list[tuple[float, int, JobId]] = []
        self._serial = 0
        self._floors: Floors[int] = Floors()
        self._granted: set[str] = set()
        self._inherited: Json = {}
        self._pick: tuple[Job, int, bool] | None = None

    def push(self, job: Job, now: float) -> None:
        """O(log n)."""
        known = self._known.get(job.id)
        if known is not None and known[1]:
            raise ValueError(f"job {job.id!r} is already queued")
        priority = job.priority
        if self._named:
            self._grant(job)
        band = self._bands.get(priority)
        (self._band(priority) if band is None else band).push(job, now)
        self._enter(job, priority, job.arrived_at)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log n) and one ``fits`` per tenant whose head does not fit."""
        if self._ages and self._ages[0][0] <= now:
            self._promote(now)
        for priority in self._floors.due() if self._named else ():
            job = self._pop(priority, now, fits, due=True)
            if job is not None:
                return job
        for negated in self._order:
            job = self._pop(-negated, now, fits, due=False)
            if job is not None:
                return job
        return None

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """First of its tenant, in the priority in which it ran."""
        known = self._known.get(job.id)
        priority = job.priority if known is None else known[0]
        self._band(priority).requeue(job, now, reason)
        self._enter(job, priority, now)

    def discard(self, job_id: JobId) -> bool:
        """O(log n)."""
        known = self._known.get(job_id)
        if known is None or not known[1]:
            return False
        del self._known[job_id]
        self._queued -= 1
        self._bands[known[0]].discard(job_id)
        self._mark(known[0])
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """O(1), or O(log tenants) when something is given back."""
        known = self._known.get(job.id)
        if known is None:  # popped by another policy before a swap
            self._grant(job)
            self._band(job.priority).charge(job, charge, now, final)
            return
        self._bands[known[0]].charge(job, charge, now, final)
        if final and not known[1]:
            del self._known[job.id]

    def drain(self) -> list[Job]:
        """Highest priority first, each in order of arrival."""
        jobs = [job for negated in self._order for job in self._bands[-negated].drain()]
        for job in jobs:
            del self._known[job.id]
        self._ages.clear()
        self._queued = 0
        for priority in self._bands:
            self._mark(priority)
        return jobs

    def dump(self) -> Json:
        """Counters of each priority, credits, what is prepaid and learnt. ``service``: above each priority's level."""
        service: dict[str, float] = {}
        for own in self._bands.values():
            for tenant, counter in own.relative().items():
                service[tenant] = max(counter, service.get(tenant, counter))
        bands = {str(priority): band.dump_counters() for priority, band in self._bands.items()}
        return {
            "service": service,
            **self._paid.dump(),
            "waiting": sorted({tenant for band in bands.values() for tenant in band["waiting"]}),
            "last_left": None,
            "level": 0.0,
            "lengths": self._lengths.dump(),
            "bands": bands,
            "floors": self._floors.dump(),
        }

    def load(self, state: Json) -> None:
        """Replace the counters: each priority's by its own or, from another policy, all by the same.

        Raises ValueError when malformed.
        """
        bands = state.get("bands", {})
        if not isinstance(bands, Mapping) or not all(isinstance(band, Mapping) for band in bands.values()):
            raise ValueError("'bands' must map priorities to their counters")
        floors = state.get("floors", {})
        read_service(state)
        self._lengths.load(state)
        self._paid.load(state)
        self._inherited = {key: state[key] for key in ("service", "waiting", "last_left", "level") if key in state}
        for name, own in bands.items():
            if name.removeprefix("-").isdigit():
                self._band(int(name)).load_counters(own)
        for priority, band in self._bands.items():
            if str(priority) not in bands:
                band.load_counters(self._inherited)
        if isinstance(floors, Mapping):
            self._floors.load(floors, {str(priority): priority for priority in self._bands})

    def explain(self, job: Job) -> Pick:
        """Its priority, why that was the next, and why the tenant was."""
        if self._pick is None or self._pick[0].id != job.id:
            return Pick("not picked last")
        _, priority, due = self._pick
        why = f"floor of priority {priority} is due" if due else f"priority {priority}"
        why += f", aged from {job.priority}" if priority != job.priority else ""
        pick = self._bands[priority].explain(job)
        return Pick(f"{why}; {pick.picked_because}", pick.virtual_start)

    def __len__(self) -> int:
        return self._queued

    def _pop(self, priority: int, now: float, fits: Fits, *, due: bool) -> Job | None:
        band = self._bands[priority]
        if not self._named:
            job = band.pop(now, fits)
        else:
            band.ordinary = not due
            try:
                job = band.pop(now, fits)
            finally:
                band.ordinary = False
            if job is not None:
                self._mark(priority)
        if job is None:
            return None
        self._known[job.id] = (priority, 0, job)
        self._queued -= 1
        self._pick = (job, priority, due)
        return job

    def _enter(self, job: Job, priority: int, since: float) -> None:
        self._serial = serial = self._serial + 1
        self._known[job.id] = (priority, serial, job)
        self._queued += 1
        if self._ageing_s is not None:
            heapq.heappush(self._ages, (since + self._ageing_s, serial, job.id))
            if len(self._ages) > 2 * self._queued + 64:
                self._ages = [item for item in self._ages if self._is_live(item)]
                heapq.heapify(self._ages)
        if self._named:
            self._mark(priority)

    def _is_live(self, item: tuple[float, int, JobId]) -> bool:
        known = self._known.get(item[2])
        return known is not None and known[1] == item[1]

    def _promote(self, now: float) -> None:
        while self._ages and self._ages[0][0] <= now:
            item = heapq.heappop(self._ages)
            if not self._is_live(item) or self._ageing_s is None:
                continue
            at, serial, job_id = item
            own, _, job = self._known[job_id]
            above = [-negated for negated in self._order if -negated > own]
            if above:
                self._bands[own].discard(job_id)
                self._bands[above[-1]].push(job, now)
                self._known[job_id] = (above[-1], serial, job)
                self._mark(own)
                self._mark(above[-1])
            # At the top it stays known, once per period: a higher priority may be seen later.
            heapq.heappush(self._ages, ((at if above else now) + self._ageing_s, serial, job_id))

    def _band(self, priority: int) -> _Band:
        band = self._bands.get(priority)
        if band is None:
            band = (
                _CountedBand(priority, self._tariff, self._lengths, self._paid, self._floors)
                if self._named
                else _Band(self._tariff, self._lengths, paid=self._paid)
            )
            self._bands[priority] = band
            insort(self._order, -priority)
            if str(priority) in self._named:
                self._floors.grant(priority, self._named[str(priority)])
            band.load_counters(self._inherited)
        return band

    def _grant(self, job: Job) -> None:
        name = job.service_class
        if name in self._named and name not in self._granted:
            self._granted.add(name)
            self._band(job.priority)
            self._floors.grant(job.priority, self._named[name])

    def _mark(self, priority: int) -> None:
        if self._named:
            self._floors.wait(priority, len(self._bands[priority]) > 0)


def _make(config: PriorityConfig, ctx: PolicyContext) -> PriorityScheduler:
    return PriorityScheduler(config)


SPEC = PolicySpec(
    "scheduling",
    "priority",
    PriorityConfig,
    _make,
    "Higher priorities first, with floors and ageing; fair shares inside a priority.",
)
