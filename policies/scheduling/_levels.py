"""The upper level of ``hierarchical``: an outer policy over tenants whose lines are inner policies.

Rules
- ``TwoLevels``: the outer policy ranks tenants and leaves their jobs to lines of somebody else's making
  (``CounterScheduler.over``): ``MemberLines`` or, cheaper, ``MemberCounters``, which know which of a tenant's jobs goes
  next. A job is held once.
- ``StandIns``: an outer policy that needs jobs of its own (when they came, how long they are) holds a stand-in for each
  queued job. When the inner choice is another job than the one whose stand-in came up, the two exchange theirs. What is
  reported for a job is charged to its stand-in outside and to itself inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from policies.scheduling._counters import CounterScheduler
from policies.scheduling._member_counters import MemberCounters, suits
from policies.scheduling._members import MemberLines
from policies.scheduling._tariff import Prepaid
from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId


class TwoLevels:
    """Costs what its two policies cost together, but one line."""

    def __init__(self, outer: SchedulingPolicy, lines: MemberLines | MemberCounters) -> None:
        self._outer = outer
        self._lines = lines
        self._came_up: Job | None = None
        self._reckon_once()

    def push(self, job: Job, now: float) -> None:
        """Into its tenant's line."""
        self._outer.push(job, now)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """The outer policy's tenant, and that tenant's inner choice."""
        self._came_up = job = self._outer.pop(now, fits)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """To the front of its member."""
        self._outer.requeue(job, now, reason)

    def discard(self, job_id: JobId) -> bool:
        """From both."""
        return self._outer.discard(job_id)

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To both."""
        self._lines.charge(job, charge, now, final)
        self._outer.charge(job, charge, now, final)

    def expired(self, now: float) -> list[Job]:
        """What the inner policies give up."""
        return self._lines.expired(now)

    def next_expired(self) -> float | None:
        """The earliest of the inner policies'."""
        return self._lines.next_expired()

    def drain(self) -> list[Job]:
        """Tenant by tenant, each in its inner policy's order."""
        return self._outer.drain()

    def dump(self) -> Json:
        """The outer policy's state, and the inner ones' by tenant."""
        return {**self._outer.dump(), "inner": self._lines.dump()}

    def load(self, state: Json) -> None:
        """Replace both. Raises ValueError when malformed."""
        inner = state.get("inner", {})
        self._lines.check(inner)
        own = {key: value for key, value in state.items() if key != "inner"}
        outer = self._outer
        if isinstance(outer, CounterScheduler) and outer.repeats:
            shared = outer.paid
            outer.pay_from(Prepaid(shared.tariff))
            try:
                outer.load(own)
            except ValueError:
                outer.pay_from(shared, repeats=True)
                raise
        else:
            outer.load(own)
        self._lines.load(inner)
        self._reckon_once()

    def explain(self, job: Job) -> Pick:
        """Why its tenant, and why it within the tenant."""
        came_up = self._came_up
        if came_up is None or not self._is(job, came_up):
            return Pick("not picked last")
        outside, within = self._outer.explain(came_up), self._lines.explain(job)
        why = f"tenant: {outside.picked_because[:95]}; member: {within.picked_because[:85]}"
        return Pick(why, outside.virtual_start)

    def __len__(self) -> int:
        return len(self._outer)

    def _reckon_once(self) -> None:
        """Where both levels charge the same for the same jobs, the outer one repeats what the inner one charged.

        Not after a load from one level, where nothing was paid within for what ran.
        """
        outer, lines = self._outer, self._lines
        if (
            isinstance(outer, CounterScheduler)
            and type(outer)._pay is CounterScheduler._pay
            and isinstance(lines, MemberCounters)
            and (outer.paid.tariff, outer.predicts) == (lines.paid.tariff, lines.predicts)
            and outer.paid.dump() == lines.paid.dump()
        ):
            outer.pay_from(lines.paid, repeats=True)

    def _is(self, job: Job, came_up: Job) -> bool:
        """Whether ``came_up``, the outer policy's last pick, was for ``job``."""
        return job.id == came_up.id


class StandIns(TwoLevels):
    """Costs what its two policies cost together, and a stand-in per job."""

    _lines: MemberLines

    def __init__(self, outer: SchedulingPolicy, lines: MemberLines) -> None:
        super().__init__(outer, lines)
        self._stand_ins: dict[JobId, Job] = {}
        """Queued and running jobs → theirs."""
        self._sitting: dict[JobId, JobId] = {}
        """The other way round."""

    def push(self, job: Job, now: float) -> None:
        """Into both."""
        if job.id in self._lines:
            raise ValueError(f"job {job.id!r} is already queued")
        stand_in = self._new(job)
        self._outer.push(stand_in, now)
        self._lines.push(job, now)
        self._sit(job.id, stand_in)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """The outer policy's tenant, and that tenant's inner choice."""
        lines = self._lines
        taken: dict[str, Job | None] = {}

        def tenant_fits(stand_in: Job) -> bool:
            tenant = stand_in.tenant
            if tenant not in taken:
                taken[tenant] = lines.pop_of(tenant, now, fits)
            return taken[tenant] is not None

        chosen: Job | None = None
        try:
            came_up = self._outer.pop(now, tenant_fits)
            chosen = None if came_up is None else taken.get(came_up.tenant)
        finally:
            for job in taken.values():  # of an outer policy that fails, or asks and then takes another tenant
                if job is not None and job is not chosen:
                    lines.push_front(job, now, RequeueReason.SWAP)
        if came_up is None or chosen is None:
            return None
        own = self._stand_ins[chosen.id]
        if own is not came_up:
            self._sit(self._sitting[came_up.id], own)
            self._sit(chosen.id, came_up)
        self._came_up = came_up
        return chosen

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """To the front, in both."""
        stand_in = self._stand_ins.get(job.id)
        self._lines.push_front(job, now, reason)
        if stand_in is None:  # popped by another policy before a swap
            stand_in = self._new(job)
            self._sit(job.id, stand_in)
        self._outer.requeue(stand_in, now, reason)

    def discard(self, job_id: JobId) -> bool:
        """From both."""
        if self._lines.discard(job_id) is None:
            return False
        self._outer.discard(self._stand_ins[job_id].id)
        self._leave(job_id)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """To both."""
        self._outer.charge(self._stand_ins.get(job.id, job), charge, now, final)
        known = job.id in self._lines
        self._lines.charge(job, charge, now, final)
        if known and job.id not in self._lines:
            self._leave(job.id)

    def drain(self) -> list[Job]:
        """Tenant by tenant, each in its inner policy's order."""
        self._outer.drain()
        jobs = self._lines.drain()
        for job in jobs:
            self._leave(job.id)
        return jobs

    def dump(self) -> Json:
        """The outer policy's state, and the inner ones' by tenant."""
        state = super().dump()
        for key in ("prepaid", "prepaid_output"):  # known outside by the stand-ins' ids
            if isinstance(state.get(key), Mapping):
                state[key] = {self._sitting.get(JobId(name), name): tokens for name, tokens in state[key].items()}
        return state

    def _is(self, job: Job, came_up: Job) -> bool:
        return self._stand_ins.get(job.id) is came_up

    def _new(self, job: Job) -> Job:
        stand_in = job
        while stand_in.id in self._sitting:  # an id that was used before may still stand in for a job that runs
            stand_in = replace(stand_in, id=JobId(f"{stand_in.id}'"))
        return stand_in

    def _sit(self, job_id: JobId, stand_in: Job) -> None:
        self._stand_ins[job_id] = stand_in
        self._sitting[stand_in.id] = job_id

    def _leave(self, job_id: JobId) -> None:
        del self._sitting[self._stand_ins.pop(job_id).id]


def levels(
    outer: SchedulingPolicy,
    make: Callable[[], SchedulingPolicy],
    member: Callable[[Job], TenantId],
    weights: Mapping[TenantId, float],
) -> TwoLevels:
    """``outer`` over tenants and a policy of ``make``'s over each one's members, joined as the two allow."""
    if not (isinstance(outer, CounterScheduler) and outer.any_lines):
        return StandIns(outer, MemberLines(make, member, weights))
    lines = MemberCounters(make, member, weights) if suits(make()) else MemberLines(make, member, weights)
    outer.over(lines)
    return TwoLevels(outer, lines)
