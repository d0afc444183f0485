"""The lower level of ``hierarchical``: per tenant an inner policy, which sees the tenant's members as its tenants.

Rules
- ``MemberLines`` owns the jobs of all tenants, queued and running, and nobody else calls an inner policy. It answers as
  the lines of an outer policy (``_counters.TenantLines``), so that a job is held once, inside.
- An inner policy is made when it is first asked for anything, and gets the jobs that came by then, in order of arrival:
  until then nothing can depend on it, and a swap moves 10,000 jobs in one push each.
- Inner policies of tenants without queued or running jobs are dropped when there are many: members of a tenant that was
  idle start anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policies.scheduling._lines import Seat
from policies.scheduling._ranking import Ranking
from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 1024
"""Inner policies that are kept before those of idle tenants are looked through."""


class Member(Job):
    """A job as the inner policy sees it: tenant and weight are its member's, all else is the job's.

    Copying all fields would cost more than a whole inner policy. The few that policies read most are set, the others
    are looked up in the job when they are asked for.
    """

    __slots__ = ("job", "queued")

    job: Job
    queued: bool

    __setattr__ = object.__setattr__  # filled in once, here; the base's refusal costs a call per field

    def __init__(self, job: Job, tenant: TenantId, weight: float) -> None:
        me: Any = self
        me.tenant = tenant
        me.weight = weight
        me.id = job.id
        me.prompt_tokens = job.prompt_tokens
        me.max_tokens = job.max_tokens
        me.model = job.model
        me.job = job
        me.queued = True

    def __getattr__(self, name: str) -> Any:
        """Called for fields that are not set here."""
        return getattr(self.job, name)


def check_inner(state: Any, probe: SchedulingPolicy) -> None:
    """Raises ValueError where ``state`` is no tenants' dumps of policies like ``probe``, which loses its own state."""
    if not isinstance(state, Mapping) or not all(isinstance(own, Mapping) for own in state.values()):
        raise ValueError("'inner' must map tenants to their members' state")
    for own in state.values():
        probe.load(dict(own))


class Inside:
    """A tenant's inner policy, made when it is asked for. ``state``: what an earlier one dumped; None: nothing."""

    __slots__ = ("_coming", "_make", "_state", "jobs", "made", "queued")

    def __init__(self, make: Callable[[], SchedulingPolicy], state: Json | None) -> None:
        self._make = make
        self._state = state
        self.made: SchedulingPolicy | None = None
        """The policy, once it was asked for."""
        self._coming: list[tuple[Member, float]] = []
        self.jobs = 0
        """Queued and running ones."""
        self.queued = 0

    @property
    def policy(self) -> SchedulingPolicy:
        """With all queued jobs in it."""
        if self.made is not None:
            return self.made
        policy = self._make()
        if self._state is not None:
            policy.load(self._state)
        for member, now in self._coming:
            policy.push(member, now)
        self._state = None
        self._coming.clear()
        self.made = policy
        return policy

    def push(self, member: Member, now: float) -> None:
        """Or keep it for when the policy is first asked for."""
        if self.made is None:
            self._coming.append((member, now))
        else:
            self.made.push(member, now)

    def drain(self) -> list[JobId]:
        """In the policy's order."""
        if self.made is not None:
            return [job.id for job in self.made.drain()]
        jobs = [member.id for member, _ in self._coming]
        self._coming.clear()
        return jobs

    def dump(self) -> Json:
        """Its counters. Members whose jobs it has not seen come back from idle then, here or elsewhere."""
        return (self._state or {}) if self.made is None else self.made.dump()

    def load(self, state: Json) -> None:
        """Replace them."""
        if self.made is None:
            self._state = state
        else:
            self.made.load(state)


class MemberLines:
    """See the module's rules. Costs what the inner policies cost."""

    def __init__(
        self, make: Callable[[], SchedulingPolicy], member: Callable[[Job], TenantId], weights: Mapping[TenantId, float]
    ) -> None:
        """``make`` builds an inner policy; ``member`` says whose a job is within its tenant."""
        self._make = make
        self._member = member
        self._weights = weights
        self._inside: dict[TenantId, Inside] = {}
        self._members: dict[JobId, Member] = {}
        self._inherited: dict[str, Json] = {}
        self._queued = 0
        self.open: dict[TenantId, Inside] = {}
        """Tenants with queued jobs; to read."""
        self._late: Ranking[TenantId] = Ranking()
        self._expires = callable(getattr(make(), "expired", None))

    # -- TenantLines ----------------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> bool:
        """Queue; True when this opens the tenant's line. Raises ValueError for an id that is queued or runs."""
        job_id = job.id
        if job_id in self._members:
            raise ValueError(f"job {job_id!r} is already queued")
        member = self._as_member(job)
        inside = self._inside.get(job.tenant)
        if inside is None:
            inside = self._of(job.tenant)
        inside.push(member, now)
        self._members[job_id] = member
        inside.jobs += 1
        self._queued += 1
        return self._entered(inside, job.tenant)

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """Put back; True when this opens the tenant's line. Raises ValueError for an id that is queued."""
        inside = self._of(job.tenant)
        member = self._members.get(job.id)
        if member is None:  # popped by another policy before a swap
            member = self._members[job.id] = self._as_member(job)
            inside.jobs += 1
        elif member.queued:
            raise ValueError(f"job {job.id!r} is already queued")
        inside.policy.requeue(member, now, reason)
        member.queued = True
        self._queued += 1
        return self._entered(inside, job.tenant)

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """Remove and return the inner policy's choice among what fits of the seat's tenant."""
        job = self.pop_of(seat.key, now, fits)
        if seat.key not in self.open:
            seat.line = None
        return job

    def pop_of(self, tenant: TenantId, now: float, fits: Fits) -> Job | None:
        """Remove and return the inner policy's choice among what fits."""

        def whole(inner: Any) -> bool:
            return fits(inner.job)

        inside = self._inside[tenant]
        member: Any = inside.policy.pop(now, whole)
        if member is None:
            return None
        member.queued = False
        self._queued -= 1
        self._left(inside, tenant)
        job: Job = member.job
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a queued job wherever it stands; None when it is not queued."""
        member = self._members.get(job_id)
        if member is None or not member.queued:
            return None
        job = member.job
        inside = self._inside[job.tenant]
        inside.policy.discard(job_id)
        del self._members[job_id]
        inside.jobs -= 1
        self._queued -= 1
        self._left(inside, job.tenant)
        return job

    def drain(self) -> list[Job]:
        """Remove and return all queued jobs: tenant by tenant, each in its inner policy's order."""
        jobs: list[Job] = []
        for inside in self._inside.values():
            drained = [self._members.pop(job_id).job for job_id in inside.drain()]
            inside.jobs -= len(drained)
            inside.queued = 0
            jobs += drained
        self._queued = 0
        self.open.clear()
        self._late.clear()
        return jobs

    def __len__(self) -> int:
        """Queued jobs."""
        return self._queued

    # -- beside ---------------------------------------------------------------------------------------------------

    def __contains__(self, job_id: JobId) -> bool:
        """Whether the job is queued or runs."""
        return job_id in self._members

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To its member. A job whose final charge it is leaves, unless it is queued."""
        member = self._members.get(job.id)
        if member is None:
            self._of(job.tenant).policy.charge(self._as_member(job), charge, now, final)
            return
        inside = self._inside[job.tenant]
        inside.policy.charge(member, charge, now, final)
        if final and not member.queued:
            del self._members[job.id]
            inside.jobs -= 1

    def explain(self, job: Job) -> Pick:
        """Why the inner policy picked it."""
        return self._inside[job.tenant].policy.explain(self._members[job.id])

    def expired(self, now: float) -> list[Job]:
        """What the inner policies give up, none removed yet."""
        due: list[TenantId] = []
        while len(self._late) and self._late.min() <= now:
            tenant = self._late.top()
            assert tenant is not None
            self._late.remove(tenant)
            due.append(tenant)
        late: list[Job] = []
        for tenant in due:
            policy: Any = self._inside[tenant].policy
            late.extend(self._members[inner.id].job for inner in policy.expired(now))
            self._note_late(tenant)
        return late

    def next_expired(self) -> float | None:
        """The earliest of the inner policies'."""
        return float(self._late.min()) if len(self._late) else None

    def dump(self) -> Json:
        """The inner policies' state, by tenant. Not of who idles since a load."""
        running = {tenant: state for tenant, state in self._inherited.items() if state.get("prepaid")}
        return {**{str(tenant): inside.dump() for tenant, inside in self._inside.items()}, **running}

    def check(self, state: Any) -> None:
        """Raises ValueError where ``state`` is no such dump: here, not in the dispatch that makes a policy."""
        check_inner(state, self._make())

    def load(self, state: Mapping[str, Json]) -> None:
        """Replace their state by one that passed ``check``."""
        self._inherited = {str(tenant): dict(own) for tenant, own in state.items()}
        for tenant, inside in self._inside.items():
            inside.load(self._inherited.pop(tenant, {}))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _entered(self, inside: Inside, tenant: TenantId) -> bool:
        inside.queued += 1
        if self._expires:
            self._note_late(tenant)
        if inside.queued > 1:
            return False
        self.open[tenant] = inside
        return True

    def _left(self, inside: Inside, tenant: TenantId) -> None:
        inside.queued -= 1
        if not inside.queued:
            del self.open[tenant]
        if self._expires:
            self._note_late(tenant)

    def _as_member(self, job: Job) -> Member:
        name = self._member(job)
        return Member(job, name, self._weights.get(name, 1.0) if self._weights else 1.0)

    def _of(self, tenant: TenantId) -> Inside:
        inside = self._inside.get(tenant)
        if inside is None:
            if len(self._inside) >= IDLE_KEPT and len(self._inside) % IDLE_KEPT == 0:
                self._inside = {name: inside for name, inside in self._inside.items() if inside.jobs}
            inside = self._inside[tenant] = Inside(self._make, self._inherited.pop(tenant, None))
        return inside

    def _note_late(self, tenant: TenantId) -> None:
        policy: Any = self._inside[tenant].policy
        at = policy.next_expired()
        if at is not None:
            self._late.set(tenant, at)
        elif tenant in self._late:
            self._late.remove(tenant)
