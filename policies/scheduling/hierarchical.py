"""``hierarchical``: tenants share by one policy, each tenant's users or keys share that by another.

Source: hierarchical fair queueing (Bennett, Zhang, "Hierarchical Packet Fair Queueing Algorithms", SIGCOMM 1996), with
any two scheduling policies of the registry.

Rules
- The outer policy sees the jobs as they are and decides between tenants. Each tenant has an inner policy of its own,
  which sees the members (users or keys) as its tenants, with their own weights. A tenant that splits its work over many
  members gains nothing: its share is the outer policy's business, which knows no members.
- Which job of a tenant runs is the inner policy's choice alone. Since the outer policy holds jobs, each queued job has
  a stand-in there; when the inner choice is another job than the stand-in that came up, the two swap theirs. Whatever
  is reported for a job is charged to its stand-in outside and to itself inside.
- A job reaches its inner policy when that is next asked for anything (``_members.py``): 10,000 jobs that move in a swap
  cost one push each, not two.
- Inner policies of tenants without queued or running jobs are dropped when there are many: members of a tenant that was
  idle start anew.
- Giving up late jobs (``policies.spi.Expiring``) is the inner policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from policies.scheduling._lines import Ranking
from policies.scheduling._members import Inside, Member, Seat
from policies.spi import Fits, Json, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

IDLE_KEPT = 1024
"""Inner policies that are kept before those of idle tenants are looked through."""


class Level(PolicyConfig):
    """One policy: ``{use: name, with: {...}}``."""

    use: str = "vtc"
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class HierarchicalConfig(PolicyConfig):
    """The two policies, what a tenant's members are, and their weights."""

    outer: Level = Level()
    inner: Level = Level()
    by: Literal["user", "key"] = "user"
    """What a member is. A job without a user counts by its key and the other way round; without both, they are one."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Member → weight within its tenant; 1 for the others."""


class HierarchicalScheduler:
    """Costs what its two policies cost together, and one copy of each job."""

    def __init__(
        self,
        outer: SchedulingPolicy,
        make_inner: Callable[[], SchedulingPolicy],
        member: Callable[[Job], str],
        weights: Mapping[str, float],
    ) -> None:
        self._outer = outer
        self._make_inner = make_inner
        self._member = member
        self._weights = weights
        self._inside: dict[TenantId, Inside] = {}
        self._seats: dict[JobId, Seat] = {}
        self._sitting: dict[JobId, Seat] = {}  # by the stand-in's id
        self._late: Ranking[TenantId] = Ranking()
        self._inherited: dict[str, Json] = {}
        self._expires = callable(getattr(make_inner(), "expired", None))
        self._pick: tuple[Seat, Job] | None = None

    def push(self, job: Job, now: float) -> None:
        """Into both, the inner one when it is next asked."""
        if job.id in self._seats:
            raise ValueError(f"job {job.id!r} is already queued")
        seat = self._seat(job)
        self._outer.push(seat.stand_in, now)
        inside = self._inside.get(job.tenant)
        (self._of(job.tenant) if inside is None else inside).push(seat, now)
        self._sit(seat)
        if self._expires:
            self._note_late(job.tenant)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """The outer policy's tenant, and that tenant's inner choice."""
        taken: dict[TenantId, Seat | None] = {}

        def real(inner: Job) -> bool:
            return fits(self._seats[inner.id].job)

        def tenant_fits(stand_in: Job) -> bool:
            tenant = stand_in.tenant
            if tenant not in taken:
                inner = self._inside[tenant].policy.pop(now, real)
                taken[tenant] = None if inner is None else self._seats[inner.id]
            return taken[tenant] is not None

        chosen: Seat | None = None
        try:
            came_up = self._outer.pop(now, tenant_fits)
            chosen = None if came_up is None else taken.get(came_up.tenant)
        finally:
            for tenant, seat in taken.items():  # of an outer policy that fails, or asks and then takes another tenant
                if seat is not None and seat is not chosen:
                    self._inside[tenant].policy.requeue(self._inner(seat), now, RequeueReason.SWAP)
        if came_up is None or chosen is None:
            return None
        if chosen.stand_in is not came_up:
            self._swap_seats(chosen, self._sitting[came_up.id])
        inside = self._inside[chosen.job.tenant]
        inside.running += 1
        chosen.queued = False
        self._pick = (chosen, came_up)
        if self._expires:
            self._note_late(chosen.job.tenant)
        return chosen.job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """To the front, in both."""
        seat = self._seats.get(job.id)
        inside = self._of(job.tenant)
        if seat is None:  # popped by another policy before a swap
            seat = self._seat(job)
            self._sit(seat)
        elif seat.queued:
            raise ValueError(f"job {job.id!r} is already queued")
        else:
            inside.running -= 1
        inside.policy.requeue(self._inner(seat), now, reason)
        self._outer.requeue(seat.stand_in, now, reason)
        seat.queued = True
        if self._expires:
            self._note_late(job.tenant)

    def discard(self, job_id: JobId) -> bool:
        """From both."""
        seat = self._seats.get(job_id)
        if seat is None or not seat.queued:
            return False
        self._inside[seat.job.tenant].policy.discard(job_id)
        self._outer.discard(seat.stand_in.id)
        self._leave(seat)
        if self._expires:
            self._note_late(seat.job.tenant)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To both."""
        seat = self._seats.get(job.id)
        if seat is None:
            self._outer.charge(job, charge, now, final)
            self._of(job.tenant).policy.charge(self._as_member(job), charge, now, final)
            return
        self._outer.charge(seat.stand_in, charge, now, final)
        inside = self._inside[job.tenant]
        inside.policy.charge(self._inner(seat), charge, now, final)
        if final and not seat.queued:
            inside.running -= 1
            self._leave(seat)

    def expired(self, now: float) -> list[Job]:
        """What the inner policies give up."""
        due: list[TenantId] = []
        while len(self._late) and self._late.min() <= now:
            tenant = self._late.top()
            assert tenant is not None
            self._late.remove(tenant)
            due.append(tenant)
        late: list[Job] = []
        for tenant in due:
            policy: Any = self._inside[tenant].policy
            late.extend(self._seats[inner.id].job for inner in policy.expired(now))
            self._note_late(tenant)
        return late

    def next_expired(self) -> float | None:
        """The earliest of the inner policies'."""
        return float(self._late.min()) if len(self._late) else None

    def drain(self) -> list[Job]:
        """In the outer policy's order of tenants and the inner one's order within each."""
        self._outer.drain()
        jobs: list[Job] = []
        for inside in self._inside.values():
            jobs.extend(self._seats[job_id].job for job_id in inside.drain())
        for job in jobs:
            self._leave(self._seats[job.id])
        self._late.clear()
        return jobs

    def dump(self) -> Json:
        """The outer policy's state, and the inner ones' by tenant."""
        outer = self._outer.dump()
        for key in ("prepaid", "prepaid_output"):  # known outside by the stand-ins' ids
            if isinstance(outer.get(key), Mapping):
                outer[key] = {self._real_id(stand_in): tokens for stand_in, tokens in outer[key].items()}
        return {**outer, "inner": {str(tenant): inside.dump() for tenant, inside in self._inside.items()}}

    def load(self, state: Json) -> None:
        """Replace both. Raises ValueError when malformed."""
        inner = state.get("inner", {})
        if not isinstance(inner, Mapping) or not all(isinstance(own, Mapping) for own in inner.values()):
            raise ValueError("'inner' must map tenants to their members' state")
        probe = self._make_inner()
        for own in inner.values():
            probe.load(own)  # here, not when a tenant's policy is made: that is in the middle of a dispatch
        self._outer.load({key: value for key, value in state.items() if key != "inner"})
        self._inherited = {str(tenant): dict(own) for tenant, own in inner.items()}
        for tenant, inside in self._inside.items():
            inside.load(self._inherited.pop(tenant, {}))

    def explain(self, job: Job) -> Pick:
        """Why its tenant, and why it within the tenant."""
        if self._pick is None or self._pick[0].job.id != job.id:
            return Pick("not picked last")
        chosen, came_up = self._pick
        outside = self._outer.explain(came_up)
        within = self._inside[job.tenant].policy.explain(self._inner(chosen))
        why = f"tenant: {outside.picked_because[:95]}; member: {within.picked_because[:85]}"
        return Pick(why, outside.virtual_start)

    def __len__(self) -> int:
        return len(self._outer)

    def _of(self, tenant: TenantId) -> Inside:
        inside = self._inside.get(tenant)
        if inside is None:
            if len(self._inside) >= IDLE_KEPT and len(self._inside) % IDLE_KEPT == 0:
                self._sweep()
            state = self._inherited.pop(tenant, None)
            inside = self._inside[tenant] = Inside(self._make_inner, self._inner, state)
        return inside

    def _sweep(self) -> None:
        self._inside = {tenant: inside for tenant, inside in self._inside.items() if not inside.idle}

    def _as_member(self, job: Job) -> Job:
        member = self._member(job)
        return Member(job, TenantId(member), self._weights.get(member, 1.0) if self._weights else 1.0)

    def _inner(self, seat: Seat) -> Job:
        inner = seat.inner
        if inner is None:
            inner = seat.inner = self._as_member(seat.job)
        return inner

    def _swap_seats(self, one: Seat, other: Seat) -> None:
        one.stand_in, other.stand_in = other.stand_in, one.stand_in
        self._sitting[one.stand_in.id] = one
        self._sitting[other.stand_in.id] = other

    def _seat(self, job: Job) -> Seat:
        stand_in = job
        while stand_in.id in self._sitting:  # an id that was used before may still stand in for a job that runs
            stand_in = replace(stand_in, id=JobId(f"{stand_in.id}'"))
        return Seat(job, stand_in)

    def _sit(self, seat: Seat) -> None:
        self._seats[seat.job.id] = self._sitting[seat.stand_in.id] = seat

    def _leave(self, seat: Seat) -> None:
        del self._seats[seat.job.id]
        del self._sitting[seat.stand_in.id]

    def _real_id(self, stand_in: str) -> str:
        seat = self._sitting.get(JobId(stand_in))
        return stand_in if seat is None else seat.job.id

    def _note_late(self, tenant: TenantId) -> None:
        policy: Any = self._inside[tenant].policy
        at = policy.next_expired()
        if at is not None:
            self._late.set(tenant, at)
        elif tenant in self._late:
            self._late.remove(tenant)


def _by_user(job: Job) -> str:
    return job.user or job.key_id or ""


def _by_key(job: Job) -> str:
    return job.key_id or job.user or ""


def _make(config: HierarchicalConfig, ctx: PolicyContext) -> HierarchicalScheduler:
    if ctx.prepare is None:
        raise PolicyConfigError("hierarchical needs a registry to build its policies", "outer")
    mistakes: list[tuple[str, str]] = []
    for name, weight in config.weights.items():
        if not 0 < weight <= 1e6:
            mistakes.append((f"weights.{name}", f"must be above 0 and at most 1e6, got {weight}"))
    made: dict[str, tuple[SchedulingPolicy, Callable[[], SchedulingPolicy]]] = {}
    for level, use in (("outer", config.outer), ("inner", config.inner)):
        if use.use == "hierarchical":
            mistakes.append((f"{level}.use", "hierarchical has two levels only; name another policy"))
            continue
        try:
            make = ctx.prepare("scheduling", use.use, use.with_)
            made[level] = (make(), make)
        except PolicyConfigError as error:
            mistakes += [(f"{level}.{path}".rstrip("."), message) for path, message in error.mistakes]
    if mistakes:
        raise PolicyConfigError(mistakes[0][1], mistakes[0][0], mistakes)

    member = _by_user if config.by == "user" else _by_key
    return HierarchicalScheduler(made["outer"][0], made["inner"][1], member, config.weights)


SPEC = PolicySpec(
    "scheduling",
    "hierarchical",
    HierarchicalConfig,
    _make,
    "Tenants share by one policy, each tenant's users or keys by another.",
)
