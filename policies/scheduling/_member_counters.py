"""The lower level of ``hierarchical`` where the inner policy is one of counters: members without stand-ins.

Rules
- A tenant's inner policy is told whose a job is and which weight that has (``CounterScheduler.among``), so it takes the
  jobs themselves, where others have to be shown them as their members' (``_members.Member``).
- A member's line stands in its seat, a tenant's inner policy in the tenant's: who goes next is found by following
  references, and nothing is looked up. What a tenant has of its own is little, since in the processor's caches it is
  cold whenever its turn comes.
- One table holds the queued jobs of all tenants (``MemberQueue``), one ``Prepaid`` what is paid for those that run: job
  ids are unique. Only ``MemberCounters`` changes them.
- An inner policy is made when it is first asked for anything, or when ``COMING`` jobs wait for it, and gets those in
  order of arrival: a swap moves 10,000 jobs without making a thousand policies, and no dispatch has more to make up.
- Decisions and dumps are those of ``_members.MemberLines`` over the same policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, cast

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._lines import Seat
from policies.scheduling._members import check_inner
from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 1024
"""Inner policies that are kept before those of idle tenants are looked through."""
COMING = 16
"""Queued jobs from which on a tenant's inner policy is made."""


class Entry:
    """A queued job, and the next of its member: linked, since a line of its own is cold memory for every member.

    Filled in by who makes it: a constructor costs more than all that is done with it.
    """

    __slots__ = ("job", "next", "order")

    job: Job
    next: Entry | None
    order: int
    """Its place among all; set when it joins its member's line."""


class MemberQueue:
    """The queued jobs of all tenants. The first entry of a member is its seat's ``line``, and is always live."""

    __slots__ = ("_back", "_front", "_stale", "jobs")

    def __init__(self) -> None:
        self.jobs: dict[JobId, Entry] = {}
        """To read."""
        self._back = 0
        self._front = 0
        self._stale = 0

    def enter(self, job: Job) -> Entry:
        """The job's entry, in no line yet. Raises ValueError for an id that is queued."""
        entry = Entry()
        entry.job = job
        entry.next = None
        if self.jobs.setdefault(job.id, entry) is not entry:
            raise ValueError(f"job {job.id!r} is already queued")
        return entry

    def append(self, inner: CounterScheduler, member: TenantId, entry: Entry) -> bool:
        """Put it at the end of its member's line; True when this opens it."""
        self._back = entry.order = self._back + 1
        seat = inner.seats.get(member)
        if seat is None or seat.line is None:
            inner.headed(member, entry).last = entry
            return True
        seat.last.next = seat.last = entry
        return False

    def put_first(self, inner: CounterScheduler, member: TenantId, entry: Entry) -> None:
        """Put it at the front of its member's line."""
        self._front = entry.order = self._front - 1
        seat = inner.seats.get(member)
        entry.next = None if seat is None else seat.line
        seat = inner.headed(member, entry)
        seat.line = entry
        if entry.next is None:
            seat.last = entry

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """Remove and return the first job of the seat's line, if it fits; with the last one, its line."""
        entry: Entry = seat.line
        job = entry.job
        if not fits(job):
            return None
        del self.jobs[job.id]
        seat.line = entry.next
        if self._stale:
            self._tidy(seat)
        return job

    def discard(self, seat: Seat, entry: Entry) -> None:
        """Remove it from the seat's line; with the last one, its line."""
        del self.jobs[entry.job.id]
        if seat.line is entry:
            seat.line = entry.next
            self._tidy(seat)
        else:
            self._stale += 1

    @property
    def crowded(self) -> bool:
        """Whether entries of jobs that were discarded further back outnumber the live ones."""
        return self._stale > len(self.jobs) + 32

    def sweep(self, seats: Iterable[Seat]) -> None:
        """Drop those entries; ``seats`` are all with a line. Amortised O(1)."""
        for seat in seats:
            last = seat.line
            for entry in self.live(seat)[1:]:
                last.next = entry
                last = entry
            last.next = None
            seat.last = last
        self._stale = 0

    def live(self, seat: Seat) -> list[Entry]:
        """The seat's entries of jobs that are queued."""
        jobs, found = self.jobs, []
        entry: Entry | None = seat.line
        while entry is not None:
            if jobs.get(entry.job.id) is entry:
                found.append(entry)
            entry = entry.next
        return found

    def clear(self) -> None:
        """Every line is gone."""
        self.jobs.clear()
        self._stale = 0

    def _tidy(self, seat: Seat) -> None:
        """Take stale entries off the front."""
        jobs = self.jobs
        entry: Entry | None = seat.line
        while entry is not None and jobs.get(entry.job.id) is not entry:
            entry = entry.next
            self._stale -= 1
        seat.line = entry


def suits(policy: SchedulingPolicy) -> bool:
    """Whether ``MemberCounters`` can hold a tenant's members by policies like this one.

    The class itself must say so: one derived from it may look at more.
    """
    return isinstance(policy, CounterScheduler) and bool(vars(type(policy)).get("any_members")) and not policy.learns


class MemberCounters:
    """See the module's rules. Costs what the inner policies cost."""

    def __init__(
        self, make: Callable[[], SchedulingPolicy], member: Callable[[Job], TenantId], weights: Mapping[TenantId, float]
    ) -> None:
        """``make`` builds an inner policy that ``suits``; ``member`` and ``weights`` as in ``MemberLines``."""
        self._make = cast("Callable[[], CounterScheduler]", make)
        self._member = member
        self._weights = weights
        self._inside: dict[TenantId, CounterScheduler | list[Job]] = {}
        """Inner policies or, before they are made, queued jobs; in order of the tenants' first jobs."""
        self._queue = MemberQueue()
        self._like = self._make()
        self.paid = self._like.paid
        """What is paid for the members' jobs that run."""
        self.predicts = self._like.predicts
        """How their output is predicted."""
        self._inherited: dict[str, Json] = {}
        self._sweep_at = IDLE_KEPT
        self.open: dict[TenantId, CounterScheduler | list[Job]] = {}
        """The same of tenants with queued jobs; to read."""

    # -- TenantLines ----------------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> bool:
        """Queue; True when this opens the tenant's line. Raises ValueError for an id that is queued."""
        queue, tenant = self._queue, job.tenant
        entry = queue.enter(job)
        inner = self._inside.get(tenant)
        if inner is None or isinstance(inner, list):
            return self._arrived(job)
        if not queue.append(inner, self._member(job), entry) or inner.waiting.live > 1:
            return False
        self.open[tenant] = inner
        return True

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """Put back; True when this opens the tenant's line. Raises ValueError for an id that is queued."""
        queue, tenant = self._queue, job.tenant
        entry = queue.enter(job)
        inner = self._policy(tenant)
        queue.put_first(inner, self._member(job), entry)
        opens = tenant not in self.open
        self.open[tenant] = inner
        return opens

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """Remove and return the inner policy's choice among what fits of the seat's tenant."""
        inner: CounterScheduler | list[Job] = seat.line
        if isinstance(inner, list):
            seat.line = inner = self._policy(seat.key)
        job = inner.pop(now, fits)
        if job is not None and not inner.waiting.live:
            seat.line = None
            del self.open[seat.key]
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a queued job wherever it stands; None when it is not queued."""
        queue = self._queue
        if job_id not in queue.jobs:
            return None
        tenant = queue.jobs[job_id].job.tenant
        inner = self._policy(tenant)
        entry = queue.jobs[job_id]  # in its member's line by now
        job = entry.job
        seat = inner.seats[self._member(job)]
        queue.discard(seat, entry)
        inner.discarded(job, seat)
        if not inner.waiting.live:
            del self.open[tenant]
        if queue.crowded:
            made = (inner for inner in self._inside.values() if not isinstance(inner, list))
            queue.sweep(seat for inner in made for seat in inner.waiting)
        return job

    def drain(self) -> list[Job]:
        """Remove and return all queued jobs: tenant by tenant, each in its inner policy's order."""
        queue = self._queue
        drained: list[Job] = []
        for inner in self._inside.values():
            if isinstance(inner, list):
                drained += inner
                inner.clear()
                continue
            entries = [entry for seat in inner.waiting for entry in queue.live(seat)]
            entries.sort(key=attrgetter("order"))
            drained += [entry.job for entry in entries]
            inner.emptied()
        self.open.clear()
        queue.clear()
        return drained

    def __len__(self) -> int:
        """Queued jobs."""
        return len(self._queue.jobs)

    # -- beside ---------------------------------------------------------------------------------------------------

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To its member."""
        inner = self._inside.get(job.tenant)
        if inner is None or isinstance(inner, list):
            inner = self._policy(job.tenant)
        inner.charge(job, charge, now, final)

    def explain(self, job: Job) -> Pick:
        """Why the inner policy picked it."""
        return self._policy(job.tenant).explain(job)

    def expired(self, now: float) -> list[Job]:
        """Policies of counters give up nothing."""
        return []

    def next_expired(self) -> float | None:
        """Likewise."""
        return None

    def dump(self) -> Json:
        """The inner policies' state, by tenant, as each would dump it alone. Not of who idles since a load."""
        states: dict[str, Json] = {}
        payers = self.paid.tenants()
        for tenant in dict.fromkeys([*self._inside, *payers.values()]):
            made = self._inside.get(tenant)
            state = made.dump_counters() if isinstance(made, CounterScheduler) else self._inherited.get(tenant, {})
            states[str(tenant)] = {**state, "prepaid": {}, "prepaid_output": {}, "lengths": []}
        for key, tokens in self.paid.dump().items():
            for job_id, left in tokens.items():
                states[str(payers[JobId(job_id)])][key][job_id] = left
        return states

    def check(self, state: Any) -> None:
        """Raises ValueError where ``state`` is no such dump."""
        check_inner(state, self._make())

    def load(self, state: Mapping[str, Json]) -> None:
        """Replace their state by one that passed ``check``."""
        self._inherited = {str(tenant): dict(own) for tenant, own in state.items()}
        self.paid.load({})
        for tenant, own_state in self._inherited.items():
            self.paid.add({key: own_state.pop(key, {}) for key in ("prepaid", "prepaid_output")}, TenantId(tenant))
        for tenant, inner in self._inside.items():
            if not isinstance(inner, list):
                inner.load_counters(self._inherited.pop(tenant, {}))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _arrived(self, job: Job) -> bool:
        """Queue a job of a tenant that has no inner policy yet."""
        tenant = job.tenant
        coming: Any = self._inside.get(tenant)
        if coming is None:
            self._make_room()
            coming = self._inside[tenant] = []
        coming.append(job)
        opens = tenant not in self.open
        self.open[tenant] = coming
        if len(coming) == COMING:
            self._policy(tenant)
        return opens

    def _policy(self, tenant: TenantId) -> CounterScheduler:
        """The tenant's inner policy, with all queued jobs in it."""
        coming = self._inside.get(tenant)
        if coming is None:
            self._make_room()
            coming = []
        elif not isinstance(coming, list):
            return coming
        inner = self._make()
        inner.among(self._member, self._weights, self._queue, self._like)
        if tenant in self._inherited:
            inner.load_counters(self._inherited.pop(tenant))
        self._inside[tenant] = inner
        if coming:
            self.open[tenant] = inner
        for job in coming:
            self._queue.append(inner, self._member(job), self._queue.jobs[job.id])
        return inner

    def _make_room(self) -> None:
        """One more tenant comes. Drop what idle ones have, when there are many: amortised O(1)."""
        if len(self._inside) >= self._sweep_at:
            busy = {*self.paid.tenants().values(), *self.open}
            self._inside = {tenant: inner for tenant, inner in self._inside.items() if tenant in busy}
            self._sweep_at = max(IDLE_KEPT, 2 * len(self._inside))
