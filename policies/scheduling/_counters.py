"""What schedulers by service ÷ weight share: a line and a counter per tenant, paid at dispatch, corrected by reports.

Rules
- A tenant's counter grows by cost ÷ weight: at dispatch by what the job is expected to cost, afterwards by the
  difference to what ran. All of a job's changes add up to the tariff of what ran.
- A tenant that comes back from idle is lifted to ``_floor()``: idling earns no credit. Nobody is ever lowered.
- Who goes next is the head of the waiting tenant with the smallest ``_rank``. A subclass decides rank and floor.
- Counters of idle tenants at or below the floor are forgotten: on return they would be lifted there anyway.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import Any, Protocol

from policies.scheduling._lengths import Lengths
from policies.scheduling._lines import Lines, Ranking
from policies.scheduling._tariff import Prepaid, Tariff
from policies.spi import Fits, Json
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 4096
"""Counters that are kept before those of idle tenants are looked through."""


class TenantLines(Protocol):
    """Queued jobs, one line per tenant; ``_lines.Lines`` says what each method does."""

    def push(self, job: Job, now: float) -> bool:
        """True when the tenant's line opens or its head changed. Raises ValueError for an id that is queued."""
        ...

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """True when the tenant's line opens or its head changed. Raises ValueError likewise."""
        ...

    def pop_if(self, tenant: TenantId, now: float, fits: Fits) -> Job | None:
        """Remove and return the job of a tenant with a line that goes next, if it fits."""
        ...

    def discard(self, job_id: JobId) -> Job | None: ...
    def drain(self) -> list[Job]: ...

    @property
    def open(self) -> Container[TenantId]:
        """Tenants with queued jobs; always the same object."""
        ...

    def __len__(self) -> int: ...


class CounterScheduler(ABC):
    """O(log tenants) per operation, and one ``fits`` per head that does not fit."""

    __slots__ = (
        "_counters", "_last_left", "_lengths", "_lines", "_paid", "_pick", "_resumed", "_sweep_at", "_waiting",
    )  # fmt: skip

    any_lines = True
    """Whether it works over any lines: it ranks tenants without looking at their jobs."""

    def __init__(
        self,
        tariff: Tariff,
        lengths: Lengths | None = None,
        *,
        lines: TenantLines | None = None,
        paid: Prepaid | None = None,
    ) -> None:
        """``lengths``: predicts output; None: only the prompt is paid at dispatch. ``paid``: may be shared."""
        self._lines: TenantLines = Lines() if lines is None else lines
        self._paid = Prepaid(tariff) if paid is None else paid
        self._lengths = Lengths("none") if lengths is None else lengths
        self._counters: dict[TenantId, float] = {}
        self._waiting: Ranking[TenantId] = Ranking()
        self._last_left: TenantId | None = None
        self._resumed: set[TenantId] = set()
        self._sweep_at = IDLE_KEPT
        self._pick: tuple[Job, float] | None = None

    def over(self, lines: TenantLines) -> None:
        """Keep the tenants' jobs in ``lines`` from now on. Only while it has none."""
        self._lines = lines

    # -- what a subclass decides ----------------------------------------------------------------------------------

    @abstractmethod
    def _floor(self) -> float:
        """The counter to which a tenant that comes back is lifted."""

    @abstractmethod
    def _why(self, counter: float, tenants: int) -> str:
        """Why the job last popped was picked, in a few words. ``counter``: its tenant's, before it was charged."""

    def _rank(self, tenant: TenantId, counter: float) -> Any:
        """Smallest goes next. Asked also, of what runs, when the tenant does not wait: then it does not matter."""
        return counter

    def _entering(self, tenant: TenantId) -> None:  # noqa: B027 - most have nothing to do here
        """A line opens; called before the tenant is lifted."""

    def _picked(self, job: Job, counter: float) -> None:  # noqa: B027
        """``job`` left the queue to run; ``counter``: its tenant's, before it was charged."""

    def _pay(self, job: Job) -> float:
        """What the job is expected to cost."""
        return self._paid.take(job, self._lengths.begin(job))

    # -- SchedulingPolicy -----------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> None:
        """O(log tenants)."""
        if self._lines.push(job, now):
            self._headed(job.tenant)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log tenants) and one ``fits`` per head that does not fit."""
        tenant = self._waiting.top()
        if tenant is None:
            return None
        job = self._lines.pop_if(tenant, now, fits)
        if job is None:
            job = self._next(now, fits)
            if job is None:
                return None
            tenant = job.tenant
        counter = self._counters[tenant]
        self._pick = (job, counter)
        after = self._count(job, self._pay(job))
        self._picked(job, counter)
        self._left(tenant, after)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """O(log tenants). What it paid stays paid and is not charged again at the next dispatch."""
        if self._lines.push_front(job, now, reason):
            self._headed(job.tenant)

    def discard(self, job_id: JobId) -> bool:
        """O(log tenants)."""
        job = self._lines.discard(job_id)
        if job is None:
            return False
        self._lengths.forget(job_id)
        self._left(job.tenant, self._count(job, -self._paid.refund(job_id)))
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """O(1), or O(log tenants) when something is given back."""
        if self._lengths.learns:
            self._lengths.note(job, charge.output, final)
        cost = self._paid.settle(job, charge, final)
        if cost:
            tenant = job.tenant
            self._waiting.change(tenant, self._rank(tenant, self._count(job, cost)))

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self._resumed = set(self._waiting)
        self._waiting.clear()
        return self._lines.drain()

    def dump(self) -> Json:
        """Counters, what is prepaid, who waits, who left last, the level of the counters, what was learnt."""
        return {**self.dump_counters(), **self._paid.dump(), "lengths": self._lengths.dump()}

    def dump_counters(self) -> Json:
        """Counters, who waits, who left last, and the level of the counters."""
        return {
            "service": {str(tenant): counter for tenant, counter in self._counters.items()},
            "waiting": [str(tenant) for tenant in self._waiting],
            "last_left": self._last_left,
            "level": self._floor(),
        }

    def load(self, state: Json) -> None:
        """Replace all that. Raises ValueError, and changes no counter, when a shared key does not have its shape."""
        self._lengths.load(state)
        self._paid.load(state)
        self.load_counters(state)

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Replace the counters. Raises ValueError likewise."""
        service = read_service(state)
        waiting, last, level = state.get("waiting", []), state.get("last_left"), state.get("level")
        if not isinstance(waiting, list) or not (last is None or isinstance(last, str)):
            raise ValueError("'waiting' must be a list of tenants and 'last_left' a tenant or null")
        if level is not None and not _is_number(level):
            raise ValueError(f"'level' must be a finite number, got {level!r}")
        self._counters = service
        self._last_left = TenantId(last) if last in service else None
        # Who waited there is not coming back from idle when its jobs are pushed here: no lift for it.
        self._resumed = {tenant for tenant in waiting if tenant in service}
        known = [service[tenant] for tenant in self._resumed] or [max(service.values(), default=0.0)]
        self._start(min(known) if level is None else float(level))
        for tenant in list(self._waiting):
            self._resumed.discard(tenant)
            self._waiting.set(tenant, self._rank(tenant, self._counters.setdefault(tenant, 0.0)))

    def explain(self, job: Job) -> Pick:
        """Its counter, and why that made it the next."""
        if self._pick is None or self._pick[0].id != job.id:
            return Pick("not picked last")
        counter = self._pick[1]
        tenants = len(self._waiting) + (job.tenant not in self._waiting)
        return Pick(self._why(counter, tenants), counter)

    def counters(self) -> Mapping[TenantId, float]:
        """Service ÷ weight per tenant, lifts included."""
        return dict(self._counters)

    def __len__(self) -> int:
        return len(self._lines)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self, level: float) -> None:  # noqa: B027
        """Counters were loaded; ``level`` is where those who come back are to be lifted."""

    def _headed(self, tenant: TenantId) -> None:
        """The tenant has a new head; where that opened its line, it comes back from idle."""
        counter = self._counters.get(tenant, 0.0)
        if tenant not in self._waiting:
            self._entering(tenant)
            if tenant in self._resumed:
                self._resumed.discard(tenant)
            else:
                counter = max(counter, self._floor())
            self._counters[tenant] = counter
        self._waiting.set(tenant, self._rank(tenant, counter))
        if len(self._counters) > self._sweep_at:
            self._sweep()

    def _next(self, now: float, fits: Fits) -> Job | None:
        """The job to run when that of the first tenant does not fit."""
        found: Job | None = None

        def accept(tenant: TenantId) -> bool:
            nonlocal found
            found = self._lines.pop_if(tenant, now, fits)
            return found is not None

        self._waiting.next(accept)
        return found

    def _left(self, tenant: TenantId, counter: float) -> None:
        """A job of the tenant left its line; ``counter``: the tenant's now."""
        if tenant in self._lines.open:
            self._waiting.set(tenant, self._rank(tenant, counter))
        else:
            self._waiting.remove(tenant)
            self._last_left = tenant

    def _count(self, job: Job, cost: float) -> float:
        """Charge the job's tenant (negative: give back); returns its counter. The caller ranks it anew."""
        tenant = job.tenant
        counter = self._counters.get(tenant)
        if counter is None:
            # Unknown here (its job began before a swap, or it was swept): it counts as if it came back now.
            counter = self._floor()
        self._counters[tenant] = counter = counter + cost / job.weight
        return counter

    def _sweep(self) -> None:
        """Amortised O(1)."""
        floor = self._floor()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > floor or tenant in self._waiting or tenant == self._last_left
        }
        self._sweep_at = max(IDLE_KEPT, 2 * len(self._counters))


def read_service(state: Mapping[str, Any]) -> dict[TenantId, float]:
    """The shared key ``service``. Raises ValueError when malformed."""
    service = state.get("service", {})
    if not isinstance(service, Mapping):
        raise ValueError("'service' must map tenants to numbers")
    for tenant, counter in service.items():
        if not _is_number(counter):
            raise ValueError(f"'service' of tenant {tenant!r} must be a finite number, got {counter!r}")
    return {TenantId(str(tenant)): float(counter) for tenant, counter in service.items()}


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
