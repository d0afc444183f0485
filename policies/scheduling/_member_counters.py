"""The lower level of ``hierarchical`` where the inner policy is one of counters: members without stand-ins.

Rules
- A tenant's inner policy is told whose a job is and which weight that has (``CounterScheduler.among``), so it takes the
  jobs themselves, where others have to be shown them as their members' (``_members.Member``).
- One table holds the queued jobs of all tenants, one ``Prepaid`` what is paid for those that run: job ids are unique.
  What a tenant has of its own is little, since in the processor's caches it is cold whenever its turn comes.
- An inner policy is made when it is first asked for anything, or when ``COMING`` jobs wait for it, and gets those in
  order of arrival: a swap moves 10,000 jobs without making a thousand policies, and no dispatch has more to make up.
- Decisions and dumps are those of ``_members.MemberLines`` over the same policies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._lines import Lines
from policies.scheduling._members import check_inner
from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 1024
"""Inner policies that are kept before those of idle tenants are looked through."""
COMING = 16
"""Queued jobs from which on a tenant's inner policy is made."""


class OwnLines(Lines):
    """A tenant's lines, one per member. The table of jobs is all tenants'."""

    __slots__ = ("_live", "_whose", "coming", "inner")

    def __init__(self, whose: Callable[[Job], TenantId], jobs: dict[JobId, tuple[int, Job]]) -> None:
        super().__init__()
        self._jobs = jobs
        self._whose = whose
        self._live = 0
        self.inner: CounterScheduler | None = None
        """Whose lines they are, once it was asked for anything."""
        self.coming: list[Job] = []
        """Queued until then."""

    def push(self, job: Job, now: float = 0.0) -> bool:
        """Append; True when this opens the member's line. Its id is known to be new."""
        self._back = order = self._back + 1
        self._jobs[job.id] = entry = (order, job)
        self._live += 1
        member = self._whose(job)
        line = self.open.get(member)
        if line is None:
            self.open[member] = deque((entry,))
            return True
        line.append(entry)
        return False

    def push_front(self, job: Job, now: float = 0.0, reason: RequeueReason = RequeueReason.SWAP) -> bool:
        """Put before all others of its member. Its id is known to be new."""
        self._front = order = self._front - 1
        self._jobs[job.id] = entry = (order, job)
        self._live += 1
        self.open.setdefault(self._whose(job), deque()).appendleft(entry)
        return True

    def pop_if(self, tenant: TenantId, now: float, fits: Fits) -> Job | None:
        """Remove and return the member's head, if it fits."""
        line = self.open[tenant]
        job = line[0][1]
        if not fits(job):
            return None
        line.popleft()
        del self._jobs[job.id]
        self._live -= 1
        if self._stale:
            self._tidy(line)
        if not line:
            del self.open[tenant]
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a queued job of this tenant."""
        entry = self._jobs[job_id]
        job = entry[1]
        member = self._whose(job)
        if self.open[member][0] is entry:
            return self.pop(member)
        del self._jobs[job_id]
        self._live -= 1
        self._stale += 1
        if self._stale > self._live + 32:
            self._sweep()
        return job

    def drain(self) -> list[Job]:
        """Remove and return this tenant's jobs in order of arrival, returned ones first."""
        jobs = self._jobs
        entries = [entry for line in self.open.values() for entry in line if jobs.get(entry[1].id) is entry]
        entries.sort(key=lambda entry: entry[0])
        for _, job in entries:
            del jobs[job.id]
        self.open.clear()
        self._live = self._stale = 0
        return [job for _, job in entries]

    def __len__(self) -> int:
        return self._live


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
        self._inside: dict[TenantId, OwnLines] = {}
        self._jobs: dict[JobId, tuple[int, Job]] = {}
        self._like = self._make()
        self.paid = self._like.paid
        """What is paid for the members' jobs that run."""
        self.predicts = self._like.predicts
        """How their output is predicted."""
        self._payers: dict[JobId, TenantId] = {}
        """Jobs of which something is paid, with their tenants."""
        self._inherited: dict[str, Json] = {}
        self._sweep_at = IDLE_KEPT
        self.open: dict[TenantId, None] = {}
        """Tenants with queued jobs; to read."""

    # -- TenantLines ----------------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> bool:
        """Queue; True when this opens the tenant's line. Raises ValueError for an id that is queued."""
        job_id, tenant = job.id, job.tenant
        if job_id in self._jobs:
            raise ValueError(f"job {job_id!r} is already queued")
        own = self._inside.get(tenant)
        if own is None:
            own = self._of(tenant)
        if own.inner is None:
            self._jobs[job_id] = (0, job)
            own.coming.append(job)
            if len(own.coming) == COMING:
                self._policy(tenant)
        elif own.push(job):
            own.inner.headed(self._member(job))
        if tenant in self.open:
            return False
        self.open[tenant] = None
        return True

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """Put back; True when this opens the tenant's line. Raises ValueError for an id that is queued."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        self._policy(job.tenant).requeue(job, now, reason)
        if job.tenant in self.open:
            return False
        self.open[job.tenant] = None
        return True

    def pop_if(self, tenant: TenantId, now: float, fits: Fits) -> Job | None:
        """Remove and return the inner policy's choice among what fits."""
        own = self._inside[tenant]
        inner = self._policy(tenant) if own.inner is None else own.inner
        job = inner.pop(now, fits)
        if job is not None:
            self._payers[job.id] = tenant
            if not own.open:
                del self.open[tenant]
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a queued job wherever it stands; None when it is not queued."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        job = entry[1]
        self._policy(job.tenant).discard(job_id)
        self._payers.pop(job_id, None)
        if not self._inside[job.tenant].open:
            del self.open[job.tenant]
        return job

    def drain(self) -> list[Job]:
        """Remove and return all queued jobs: tenant by tenant, each in its inner policy's order."""
        self.open.clear()
        drained: list[Job] = []
        for own in self._inside.values():
            drained += own.coming if own.inner is None else own.inner.drain()
            own.coming.clear()
        self._jobs.clear()
        return drained

    def __len__(self) -> int:
        """Queued jobs."""
        return len(self._jobs)

    # -- beside ---------------------------------------------------------------------------------------------------

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To its member."""
        own = self._inside.get(job.tenant)
        inner = self._policy(job.tenant) if own is None or own.inner is None else own.inner
        inner.charge(job, charge, now, final)
        if final:
            self._payers.pop(job.id, None)

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
        for tenant in dict.fromkeys([*self._inside, *self._payers.values()]):
            own = self._inside.get(tenant)
            made = None if own is None else own.inner
            state = self._inherited.get(tenant, {}) if made is None else made.dump_counters()
            states[str(tenant)] = {**state, "prepaid": {}, "prepaid_output": {}, "lengths": []}
        for key, tokens in self.paid.dump().items():
            for job_id, left in tokens.items():
                states[str(self._payers[JobId(job_id)])][key][job_id] = left
        return states

    def check(self, state: Any) -> None:
        """Raises ValueError where ``state`` is no such dump."""
        check_inner(state, self._make())

    def load(self, state: Mapping[str, Json]) -> None:
        """Replace their state by one that passed ``check``."""
        self._inherited = {str(tenant): dict(own) for tenant, own in state.items()}
        paid: dict[str, dict[str, int]] = {"prepaid": {}, "prepaid_output": {}}
        self._payers = {}
        for tenant, own_state in self._inherited.items():
            for key, tokens in paid.items():
                found = own_state.pop(key, {})
                tokens.update(found)
                self._payers.update(dict.fromkeys(map(JobId, found), TenantId(tenant)))
        for tenant, own in self._inside.items():
            if own.inner is not None:
                own.inner.load_counters(self._inherited.pop(tenant, {}))
        self.paid.load(paid)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _of(self, tenant: TenantId) -> OwnLines:
        own = self._inside.get(tenant)
        if own is None:
            if len(self._inside) >= self._sweep_at:
                self._sweep()
            own = self._inside[tenant] = OwnLines(self._member, self._jobs)
        return own

    def _policy(self, tenant: TenantId) -> CounterScheduler:
        """The tenant's inner policy, with all queued jobs in it."""
        own = self._of(tenant)
        if own.inner is not None:
            return own.inner
        own.inner = inner = self._make()
        inner.among(self._member, self._weights, own, self._like)
        if tenant in self._inherited:
            inner.load_counters(self._inherited.pop(tenant))
        for job in own.coming:
            if own.push(job):
                inner.headed(self._member(job))
        own.coming.clear()
        return inner

    def _sweep(self) -> None:
        """Drop what idle tenants have. Amortised O(1)."""
        busy = {*self._payers.values(), *self.open}
        self._inside = {tenant: own for tenant, own in self._inside.items() if tenant in busy}
        self._sweep_at = max(IDLE_KEPT, 2 * len(self._inside))
